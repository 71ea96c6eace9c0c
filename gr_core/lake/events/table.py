"""The event table: one Delta Lake table, one ingestion = one atomic commit.

In: batches of contract rows. Out: `Commit` values, and rows at a pinned version. The commit's own metadata hold
everything that is told about it later, so a crash right after it loses nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from gr_core.config import Config
from gr_core.data.contract import Batch, polars_schema
from gr_core.errors import CommitConflict, ConfigError, FormatError, StoreUnavailable
from gr_core.hashing import bucket_of
from gr_core.lake import merging, quarantine, store, tombstones
from gr_core.lake.commits import COMMIT_KEY, NIGHT_KEY, Commit
from gr_core.lake.events import erasure, layout
from gr_core.refs import Bound, Rows
from gr_core.schema import EVENT_FORMAT, action_time, event_schema

logger = logging.getLogger("gr_core.lake.events")

_APP = "ingest"
_NIGHT = "night-"  # app transaction of a night: its commit number
_PLACE = "commit-"  # app transaction of a commit: the lowest Delta version that it can have made
_ATTEMPTS = 30
_FEW_USERS = 1000  # up to so many named users the buckets of a read are worked out from them
_WRITER = WriterProperties(compression="ZSTD", compression_level=3)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one attempt to commit would write."""

    inserts: pl.DataFrame
    updates: pl.DataFrame
    quarantine: pl.DataFrame
    rows: Rows
    labels_changed: int


class EventTable:
    """A handle without state: every call looks at the table as it is now.

    Args:
        uri: The table; the quarantine lies beside it.
        config: The run's config; its `lake` must be the one the table was made with.
        up_to: Reads leave out rows of greater commits: a night that reads a version younger than its own commit's,
            since rows were removed (`pin`), sees none of later nights'.

    Raises:
        UsageError: The path has characters that Delta Lake cannot have in it.
    """

    def __init__(self, uri: str, config: Config, *, up_to: int | None = None) -> None:
        self.uri = uri.rstrip("/")
        self._table_uri = store.delta_uri(self.uri)
        self.config = config
        self.up_to = up_to
        self.lake = self.uri.rsplit("/", 1)[0]
        self.quarantine_uri = store.join(self.lake, "quarantine")

    def exists(self) -> bool:
        """Tell whether the table was ever made (it may still be without a commit)."""
        return self._open() is not None

    def delta_version(self) -> int:
        """Return the newest Delta version; -1 where there is no table."""
        table = self._open()
        return -1 if table is None else int(table.version())

    def commits(self) -> list[Commit]:
        """Return all commits, oldest first; one small file of the log is read for each."""
        table = self._open()
        last = 0 if table is None else table.transaction_version(_APP) or 0
        found = [self._commit(table, number) for number in range(1, last + 1) if table is not None]
        return [commit for commit in found if commit is not None]

    def last_commit(self) -> Commit | None:
        """Return the newest commit; None where nothing was ingested."""
        table = self._open()
        number = None if table is None else table.transaction_version(_APP)
        return None if table is None or not number else self._commit(table, number)

    def find(self, night: str) -> Commit | None:
        """Return the commit that names a night; None where that night has not ingested. Costs the same at any age."""
        table = self._open()
        return None if table is None else self._find(table, night)

    def erasures(self, delta_version: int | None = None) -> int:
        """Return how many versions up to this one (default the newest) removed rows; 0 where there is no table."""
        table = self._open(delta_version)
        return 0 if table is None else table.transaction_version(erasure.COUNT) or 0

    def pin(self, commit: Commit) -> int:
        """Return the version that a night of this commit reads: the commit's, or the newest that removed rows since."""
        table = self._open()
        erased = None if table is None else table.transaction_version(erasure.ERASED_AT)
        return max(commit.delta_version, erased or 0)

    def quarantine(self, commit: int) -> pl.DataFrame:
        """Return a commit's quarantined rows (reason, feed, file, row); empty for commits the table does not have."""
        table = self._open()
        found = None if table is None else self._commit(table, commit)
        return quarantine.read(self.quarantine_uri, found.quarantine if found else "")

    def ingest(
        self,
        night: str,
        batch: Batch,
        *,
        parent: Bound | None,
        approve: Callable[[Commit], None] | None = None,
    ) -> Commit:
        """Write a batch as the night's one commit; the existing commit where the night already has one.

        New events enter up to the daily cap; repeats of events in the table count as duplicates and update the bits
        they know. Quarantine is written first. On a conflict with another writer everything is worked out again.

        Args:
            night: Names the commit.
            batch: Contract rows; an empty batch is a commit, too.
            parent: Watermark of the night's parent; changed labels inside it are counted.
            approve: Sees the commit's record before anything is written, and raises to stop it (data checks).

        Raises:
            CommitConflict: Other writers won every attempt.
            ConfigError: The config's lake is not the one the table was made with.
            StoreUnavailable: The object store did not answer.
        """
        batch.check()
        for attempt in range(_ATTEMPTS):
            try:
                table = self._create()
            except CommitFailedError:
                continue
            done = self._find(table, night)
            if done is not None:
                return done
            number = (table.transaction_version(_APP) or 0) + 1
            plan = self._plan(table, batch, parent)
            plan.rows.check()
            if approve is not None:
                approve(_record(batch, plan, number=number, night=night, path=""))
            path = quarantine.write(self.quarantine_uri, number, night, plan.quarantine)
            record = _record(batch, plan, number=number, night=night, path=path)
            try:
                self._write(table, plan, number, record)
            except CommitFailedError:
                logger.info("commit %d of night %s met another writer, attempt %d", number, night, attempt + 1)
                continue
            except DeltaError as error:
                self._unanswered(error)
                raise
            made = self.find(night)
            if made is None:
                raise CommitConflict(f"the commit of night {night} is not in the table", where=self.uri)
            _log(made)
            return made
        raise CommitConflict(
            f"night {night}: other writers won {_ATTEMPTS} attempts to commit to {self.uri}; run it again when they "
            "are done",
            where=self.uri,
        )

    def read(
        self,
        delta_version: int,
        *,
        buckets: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        users: Sequence[str] | None = None,
        commits_after: int | None = None,
    ) -> pl.DataFrame:
        """Read rows of a pinned version.

        Args:
            delta_version: The version that the night pinned.
            buckets: Only these buckets.
            columns: Only these columns, in this order; default all of `event_schema`.
            users: Only these users.
            commits_after: Only commits with a greater number.

        Returns:
            Rows by (user_id, shown_at, event_id), as far as these columns are read. Columns that the version did not
            have yet are null.

        Raises:
            FormatError: The version is not there, or was written by another format.
        """
        table, wanted = self._pinned(delta_version)
        files = layout.files_of(table)
        if users is not None:
            if len(users) <= _FEW_USERS:
                own = {bucket_of(user, self.config.lake.num_buckets) for user in users}
                buckets = sorted(own if buckets is None else own & set(buckets))
            wanted.append(pl.col("user_id").is_in(list(users)))
        if commits_after is not None:
            files = files.filter(layout.at_least("commit", commits_after + 1))
            wanted.append(pl.col("commit") > commits_after)
        return self._rows(layout.in_buckets(files, buckets), wanted, columns)

    def read_since(
        self,
        delta_version: int,
        *,
        bucket: int,
        commit_after: int,
        shown_from_us: int | None,
        updated_after: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        """Read the rows of a bucket that came, were shown or changed lately; files that hold none are not opened.

        Args:
            delta_version: The version that the night pinned.
            bucket: The bucket.
            commit_after: Rows with a greater commit, or
            shown_from_us: shown at or after this (microseconds since the epoch; None: that alone takes no row), or
            updated_after: last changed by a greater commit (None: that alone takes no row).
            columns: Only these columns, in this order; default all of `event_schema`.

        Returns:
            Rows by (user_id, shown_at, event_id), as `read`.

        Raises:
            FormatError: The version is not there, or was written by another format.
        """
        table, wanted = self._pinned(delta_version)
        files = layout.in_buckets(layout.files_of(table), [bucket])
        may, does = layout.at_least("commit", commit_after + 1), pl.col("commit") > commit_after
        if shown_from_us is not None:
            start = pl.lit(shown_from_us, pl.Int64).cast(layout.TIME)
            may, does = may | layout.at_least("shown_at", start), does | (pl.col("shown_at") >= start)
        if updated_after is not None:
            may = may | layout.at_least("updated", updated_after + 1)
            does = does | (pl.col("updated") > updated_after)
        return self._rows(files.filter(may), [does, *wanted], columns)

    def read_users(
        self, delta_version: int, *, bucket: int, users: Sequence[str], columns: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Read all rows of some users of a bucket; row groups between whose users none of them lies are not read.

        Args:
            delta_version: The version that the night pinned.
            bucket: The bucket of all these users.
            users: The users.
            columns: Only these columns, in this order; default all of `event_schema`.

        Returns:
            Rows by (user_id, shown_at, event_id), as `read`.

        Raises:
            FormatError: The version is not there, or was written by another format.
        """
        table, wanted = self._pinned(delta_version)
        files = layout.in_buckets(layout.files_of(table), [bucket])
        if not users:
            return self._rows(files.clear(), [], columns)
        files = files.filter(layout.at_least("user_id", min(users)) & layout.at_most("user_id", max(users)))
        return self._rows(files, [pl.col("user_id").is_in(list(users)), *wanted], columns)

    def _rows(self, files: pl.DataFrame, wanted: list[pl.Expr], columns: Sequence[str] | None) -> pl.DataFrame:
        """Read the wanted rows of chosen files, in the order of every read, forgotten users left out."""
        names = list(columns) if columns is not None else polars_schema(self.config).names()
        hidden = tombstones.load(self.lake)
        hides = not hidden.buckets.isdisjoint(files["bucket"])
        asked = names if not hides or "user_id" in names else [*names, "user_id"]
        frame = layout.scan(files, self.config).filter(*wanted).select(asked).collect()
        if hides:
            frame = frame.filter(~hidden.hides(frame["user_id"])).select(names)
        order = [name for name in ("user_id", "shown_at", "event_id") if name in names]
        return frame.sort(order, maintain_order=True) if order else frame

    def _pinned(self, delta_version: int) -> tuple[DeltaTable, list[pl.Expr]]:
        """Open a pinned version, or what stands in for it after a forgetting, and say which of its rows to read."""
        table, newest = (
            erasure.readable(self._open, delta_version)
            if tombstones.load(self.lake)
            else (self._open(delta_version), None)
        )
        if table is None:
            raise FormatError(f"{self.uri}: there is no version {delta_version} of the event table", where=self.uri)
        return table, [pl.col("commit") <= limit for limit in (newest, self.up_to) if limit is not None]

    def at(self, delta_version: int | None = None) -> DeltaTable | None:
        """Open a version (None: the newest) for `gr_core.lake.events.erasure`; None where there is no table."""
        return self._open(delta_version)

    def _find(self, table: DeltaTable, night: str) -> Commit | None:
        number = table.transaction_version(f"{_NIGHT}{night}")
        return None if number is None else self._commit(table, number)

    def _commit(self, table: DeltaTable, number: int) -> Commit | None:
        """Read a commit's record from the log, without a walk through it; None where the table has no such commit."""
        version = table.transaction_version(f"{_PLACE}{number}")
        while version is not None and version <= table.version():
            told = _commit_info(self.uri, version)
            if COMMIT_KEY in told:
                record = Commit.from_json({**json.loads(told[COMMIT_KEY]), "delta_version": version})
                if record.number == number:
                    return record
            version += 1  # other writers' versions (compaction, erasure) may have come in between
        return None

    def _open(self, version: int | None = None) -> DeltaTable | None:
        try:
            table = DeltaTable(self._table_uri, version=version)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            self._unanswered(error)
            if version is not None:
                raise FormatError(
                    f"{self.uri}: version {version} of the event table cannot be read: {error}", where=self.uri
                ) from error
            raise
        told = json.loads(table.metadata().description or "{}")
        if told.get("format") != EVENT_FORMAT:
            raise FormatError(
                f"{self.uri}: event table of format {told.get('format')}, this release reads {EVENT_FORMAT}; "
                "use the release that wrote it, or a new home",
                where=self.uri,
            )
        if told["lake"] != _lake_identity(self.config):
            raise ConfigError(
                f"lake: the table at {self.uri} was made with {told['lake']}, the config says "
                f"{_lake_identity(self.config)}; lake never changes in a home: set it back or use another home",
                where="lake",
            )
        return table

    def _create(self) -> DeltaTable:
        """Open the table, making it where there is none; the version it is made at holds no commit of ours.

        Columns that the config has gained are added first, by a Delta version of their own without rows: the merge
        of deltalake 1.6.6 with merge_schema nulls the columns of the rows that it only copies.
        """
        source = self.config.source
        table = self._open()
        if table is not None:
            there = pa.schema(table.schema().to_arrow()).names
            wanted = event_schema(source.action_names, source.side_features)
            gained = pa.schema([item for item in wanted if item.name not in there])
            if gained.names:
                table.alter.add_columns(list(Schema.from_arrow(gained).fields))
            return table
        try:
            DeltaTable.create(
                self._table_uri,
                event_schema(source.action_names, source.side_features),
                mode="ignore",
                partition_by=["bucket"],
                name="daybreak-events",
                description=json.dumps({"format": EVENT_FORMAT, "lake": _lake_identity(self.config)}),
                # nights are found in the log for good, whatever its age
                configuration={"delta.enableExpiredLogCleanup": "false"},
            )
        except CommitFailedError:
            logger.info("another writer made the event table %s at the same moment", self.uri)
            raise
        except DeltaError as error:
            self._unanswered(error)
            raise
        table = self._open()
        if table is None:
            raise StoreUnavailable(f"{self.uri}: the event table was made but cannot be opened", where=self.uri)
        return table

    def _unanswered(self, error: DeltaError) -> None:
        if not store.is_local(self.uri):
            raise StoreUnavailable(
                f"{self.uri} did not answer: {error}; check endpoint and credentials", where=self.uri
            ) from error

    def _plan(self, table: DeltaTable, batch: Batch, parent: Bound | None) -> _Plan:
        """Work out inserts, updates and quarantine against the table as `table` sees it."""
        config, events = self.config, batch.events
        old = merging.repeated(config, _scan(table, config), events)
        repeats = events["event_id"].is_in(old["event_id"].implode())
        learnt = merging.updates(config, old, events.filter(repeats), parent)
        inserts, files = events.filter(~repeats), batch.files.filter(~repeats)
        fits = merging.capped(config, inserts, merging.day_counts(config, _scan(table, config), inserts))
        over = inserts.filter(~fits)
        surplus = pl.DataFrame(
            {
                "reason": pl.Series(["over_daily_cap"] * over.height, dtype=pl.String),
                "feed": pl.Series([batch.feed] * over.height, dtype=pl.String),
                "file": files.filter(~fits),
                "row": over.select(pl.struct(pl.all()).struct.json_encode()).to_series(),
            }
        )
        quarantined = pl.concat([batch.quarantine, surplus]).sort("reason", "feed", "file", "row")
        inserts = inserts.filter(fits)
        return _Plan(
            inserts=inserts,
            updates=learnt.rows,
            quarantine=quarantined,
            rows=Rows(
                read=batch.read,
                committed=inserts.height,
                duplicates=batch.duplicates + int(repeats.sum()),
                quarantined=quarantined.height,
                forgotten=batch.forgotten,
            ),
            labels_changed=learnt.labels_changed,
        )

    def _write(self, table: DeltaTable, plan: _Plan, number: int, record: Commit) -> None:
        """Write inserts and updates as one Delta commit; without an update no file is rewritten."""
        properties = CommitProperties(
            custom_metadata={NIGHT_KEY: record.night, COMMIT_KEY: json.dumps(record.to_json(), sort_keys=True)},
            app_transactions=[
                Transaction(_APP, number),
                Transaction(f"{_NIGHT}{record.night}", number),
                Transaction(f"{_PLACE}{number}", table.version() + 1),
            ],
        )
        inserts = plan.inserts.with_columns(pl.lit(number, pl.Int64).alias(name) for name in ("commit", "updated"))
        schema = _merged_schema(table, self.config)
        if plan.updates.is_empty():
            write_deltalake(
                table,
                _arrow(inserts, schema),
                mode="append",
                writer_properties=_WRITER,
                commit_properties=properties,
            )
            return
        # an update finds its row by the commit it has; new rows carry this commit's number, so they match nothing
        places = [f"t.{name} IN ({_listed(plan.updates[name])})" for name in ("bucket", "commit")]
        match = [f"t.{name} = s.{name}" for name in ("bucket", "commit", "event_id")]
        learnt = ["actions", "known", *(action_time(name) for name in self.config.source.action_names), "updated"]
        updates = plan.updates.with_columns(pl.lit(number, pl.Int64).alias("updated"))
        merger = table.merge(
            _arrow(pl.concat([inserts, updates], how="diagonal"), schema, nullable=True),
            " AND ".join(places + match),
            source_alias="s",
            target_alias="t",
            writer_properties=_WRITER,
            commit_properties=properties,
        )
        merger.when_matched_update({f"`{name}`": f"s.`{name}`" for name in learnt}).when_not_matched_insert(
            {f"`{name}`": f"s.`{name}`" for name in schema.names}
        ).execute()


def _commit_info(uri: str, version: int) -> dict[str, Any]:
    """Return what one Delta version's own log entry tells of itself: a read of one small file, at any age."""
    content = store.read_bytes(store.join(uri, "_delta_log", f"{version:020d}.json"))
    actions = (json.loads(line) for line in content.splitlines() if line.startswith(b'{"commitInfo"'))
    return dict(next((action["commitInfo"] for action in actions), {}))


def _log(made: Commit) -> None:
    rows, why = made.rows, ", ".join(f"{reason} {count}" for reason, count in made.reasons.items())
    logger.info(
        "night %s ingested as commit %d: read %d, committed %d, duplicates %d, quarantined %d%s",
        *(made.night, made.number, rows.read, rows.committed, rows.duplicates, rows.quarantined),
        f" ({why})" if why else "",
    )


def _record(batch: Batch, plan: _Plan, *, number: int, night: str, path: str) -> Commit:
    reasons = plan.quarantine.group_by("reason").len().sort("reason")
    return Commit(
        number=number,
        delta_version=-1,  # known only once committed; the log says it
        night=night,
        feed=batch.feed,
        rows=plan.rows,
        updated=plan.updates.height,
        labels_changed_after_supervision=plan.labels_changed,
        reasons={reason: int(count) for reason, count in reasons.iter_rows()},
        missing_side=dict(batch.missing_side),
        outside_window=batch.outside_window,
        bad_action_times=batch.bad_action_times,
        unknown_columns=dict(batch.unknown_columns),
        figures=dict(batch.figures),
        quarantine=path,
    )


def _scan(table: DeltaTable, config: Config) -> pl.LazyFrame:
    return layout.scan(layout.files_of(table), config)


def _merged_schema(table: DeltaTable, config: Config) -> pa.Schema:
    """Return the columns to write: the config's, then those only the table has (written null)."""
    wanted = event_schema(config.source.action_names, config.source.side_features)
    there = pa.schema(table.schema().to_arrow())
    return pa.schema([*wanted, *(there.field(name) for name in there.names if name not in wanted.names)])


def _arrow(frame: pl.DataFrame, schema: pa.Schema, *, nullable: bool = False) -> pa.Table:
    if nullable:
        schema = pa.schema([item.with_nullable(True) for item in schema])
    table = frame.to_arrow()
    columns = [
        table[item.name].cast(item.type) if item.name in table.column_names else pa.nulls(len(table), item.type)
        for item in schema
    ]
    return pa.table(columns, schema=schema)


def _listed(values: pl.Series) -> str:
    return ", ".join(str(value) for value in values.unique().sort())


def _lake_identity(config: Config) -> dict[str, Any]:
    lake = config.lake
    return {"zone": lake.zone, "num_buckets": lake.num_buckets, "holdout_fraction": lake.holdout_fraction}
