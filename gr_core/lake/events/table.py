"""The event table: one Delta Lake table, one ingestion = one atomic commit.

In: batches of contract rows. Out: `Commit` values, and rows at a pinned version. The commit's own metadata hold
everything that is told about it later, so a crash right after it loses nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from gr_core.config import Config
from gr_core.data.actions import ActionBatch
from gr_core.data.batch import Batch, SpilledBatch, polars_schema
from gr_core.errors import CommitConflict, FormatError
from gr_core.hashing import bucket_of
from gr_core.lake import pending, quarantine, tombstones
from gr_core.lake.commits import COMMIT_KEY, INGEST, NIGHT_KEY, Commit
from gr_core.lake.events import books, erasure, layout, upkeep
from gr_core.lake.events.acting import Acting
from gr_core.lake.events.planning import Numbers, Plan, Planner
from gr_core.lake.events.versions import NIGHT, PLACE, RESTATED, Versions
from gr_core.lake.events.writing import Writing
from gr_core.refs import Bound
from gr_core.schema import event_schema

logger = logging.getLogger("gr_core.lake.events")

_ATTEMPTS = 30
_FEW_USERS = 1000  # up to so many named users the buckets of a read are worked out from them


class EventTable(Versions):
    """A handle without state: every call looks at the table as it is now.

    Args:
        uri: The table; the quarantine lies beside it.
        config: The run's config; its `lake` must be the one the table was made with.
        up_to: Reads leave out rows of greater commits: a night that reads a version younger than its own commit's,
            since rows were removed (`pin`), sees none of later nights'.

    Raises:
        UsageError: The path has characters that Delta Lake cannot have in it.
    """

    def ingest(
        self,
        night: str,
        batch: Batch | SpilledBatch,
        *,
        parent: Bound | None,
        approve: Callable[[Commit], None] | None = None,
        actions: ActionBatch | None = None,
    ) -> Commit:
        """Write a batch as the night's one commit; the existing commit where the night already has one.

        New events enter up to the daily cap; repeats of events in the table count as duplicates and update the bits
        they know. An event keeps the shown_at and visible_at that it came with, whatever a repeat says: they decide
        when it is due, and moved it would be due twice or never. With `source.restate = "replace"` the earlier rows
        of a restated day leave the table unless they are delivered again. Action rows join the events they are about,
        new or in the table; those without one wait for it from commit to commit. Quarantine and waiting rows are
        written first. On a conflict with another writer everything is worked out again.

        Args:
            night: Names the commit.
            batch: Contract rows; an empty batch is a commit, too.
            parent: Watermark of the night's parent; changed labels inside it are counted.
            approve: Sees the commit's record before anything is committed, and raises to stop it (data checks).
            actions: The night's rows of the actions feeds; None where the source has none: what waits goes on waiting.

        Raises:
            CommitConflict: Other writers won every attempt.
            ConfigError: The config's lake is not the one the table was made with.
            StoreUnavailable: The object store did not answer.
        """
        for attempt in range(_ATTEMPTS):
            try:
                table = self._create()
            except CommitFailedError:
                continue
            done = self._find(table, night)
            if done is not None:
                return done
            writing = Writing(table, self.uri, _written_schema(table, self.config))
            try:
                plan, record = self._plan(table, batch, night, actions, parent, writing)
                record = self._kept(record, plan, approve)
            except BaseException:
                writing.discard()
                raise
            try:
                self._write(table, writing, record)
            except CommitFailedError:
                writing.discard()
                logger.info("night %s met another writer, attempt %d", night, attempt + 1)
                continue
            except DeltaError as error:  # whether it was committed is open, so its files stay
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

    def maintain(self, *, keep_versions: Iterable[int] = (), retention_hours: int = 24) -> upkeep.Kept:
        """Make few files of complete runs of commits, and delete files that no night needs; safe to repeat and to kill.

        Args:
            keep_versions: Versions that unfinished nights, and those of `lake.rerun_days`, are pinned to.
            retention_hours: Files that left the table within so many hours stay, whatever their version.

        Raises:
            StoreUnavailable: The object store did not answer.
        """
        newest = self.last_commit()
        if newest is None:
            return upkeep.Kept()
        try:
            done = upkeep.compact(self._open, self.uri, newest.number)
            table = self._open()
            deleted = 0
            if table is not None:
                deleted = upkeep.vacuum(table, self.uri, _with_erased(table, keep_versions), retention_hours)
        except DeltaError as error:
            self._unanswered(error)
            raise
        return replace(done, deleted_files=deleted)

    def stale_files(self, *, keep_versions: Iterable[int] = (), retention_hours: int = 24) -> dict[str, int]:
        """Return the files that `maintain` would delete were there nothing to compact, by name, with their bytes.

        Raises:
            StoreUnavailable: The object store did not answer.
        """
        table = self._open()
        if table is None:
            return {}
        try:
            return upkeep.stale(table, self.uri, _with_erased(table, keep_versions), retention_hours)
        except DeltaError as error:
            self._unanswered(error)
            raise

    def _rows(self, files: pl.DataFrame, wanted: list[pl.Expr], columns: Sequence[str] | None) -> pl.DataFrame:
        """Read the wanted rows of chosen files, in the order of every read, forgotten users left out."""
        names = list(columns) if columns is not None else polars_schema(self.config).names()
        hidden = tombstones.load(self.lake)
        hides = not hidden.buckets.isdisjoint(files["bucket"])
        asked = names if not hides or "user_id" in names else [*names, "user_id"]
        frame = layout.collect(layout.scan(files, self.config).filter(*wanted).select(asked), files)
        if hides:
            frame = frame.filter(~hidden.hides(frame["user_id"])).select(names)
        order = [name for name in layout.ORDER if name in names]
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

    def _plan(
        self,
        table: DeltaTable,
        batch: Batch | SpilledBatch,
        night: str,
        actions: ActionBatch | None,
        parent: Bound | None,
        writing: Writing,
    ) -> tuple[Plan, Commit]:
        """Work an ingestion out against the table as `table` sees it, write its files, and return its record."""
        numbers = self._numbers(table, batch)
        last = self._commit(table, numbers.days[0] - 1)
        waiting = last.pending if last is not None else ""
        acting = None
        if actions is not None:
            acting = Acting(self.config, actions.check(), pending.read(self.pending_uri, waiting))
        files = layout.files_of(table)
        plan = Planner(self.config, files, batch, numbers=numbers, parent=parent, writing=writing, acting=acting).plan()
        return plan, replace(_record(batch, plan, numbers, night), pending=waiting)

    def _kept(self, record: Commit, plan: Plan, approve: Callable[[Commit], None] | None) -> Commit:
        """Ask for approval, then write what a record names beside the data files."""
        if approve is not None:
            approve(record)
        broken = plan.quarantine
        if plan.settled is not None:
            broken = pl.concat([broken, plan.settled.quarantine])
            waiting = pending.write(self.pending_uri, record.number, record.night, plan.settled.pending)
            record = replace(record, pending=waiting)
        path = quarantine.write(self.quarantine_uri, record.number, record.night, broken)
        return replace(record, quarantine=path)

    def _numbers(self, table: DeltaTable, batch: Batch | SpilledBatch) -> Numbers:
        """Number an ingestion: its restated days first, each with a number of its own, then the night's own."""
        first = (table.transaction_version(INGEST) or 0) + 1
        days = tuple(range(first, first + max(len(batch.inputs), 1)))
        before = {day: self.delivered(day)[1] for day in list(batch.inputs)[:-1]}
        replaces = self.config.source.restate == "replace"
        return Numbers(own=days[-1], days=days, before=before, replaces=replaces)

    def _write(self, table: DeltaTable, writing: Writing, record: Commit) -> None:
        """Make an ingestion visible as one Delta commit."""
        told = {NIGHT_KEY: record.night, COMMIT_KEY: json.dumps(record.to_json(), sort_keys=True)}
        marks = [
            Transaction(INGEST, record.number),
            Transaction(f"{NIGHT}{record.night}", record.number),
            Transaction(f"{PLACE}{record.number}", table.version() + 1),
            *(Transaction(f"{RESTATED}{day}", record.number) for day in record.numbers),
            books.entry(table, record.rows.committed - record.replaced),
        ]
        if record.replaced:
            erasures = (table.transaction_version(erasure.COUNT) or 0) + 1
            told[erasure.MARK] = str(erasures)
            marks.append(Transaction(erasure.COUNT, erasures))
        writing.commit(CommitProperties(custom_metadata=told, app_transactions=marks))


def _log(made: Commit) -> None:
    rows, why = made.rows, ", ".join(f"{reason} {count}" for reason, count in made.reasons.items())
    acted = made.action_rows
    if acted is not None:
        logger.info(
            "night %s: action rows read %d, merged %d, duplicates %d, pending %d, quarantined %d",
            *(made.night, acted.read, acted.merged, acted.duplicates, acted.pending, acted.quarantined),
        )
    logger.info(
        "night %s ingested as commit %d: read %d, committed %d, duplicates %d, quarantined %d%s",
        *(made.night, made.number, rows.read, rows.committed, rows.duplicates, rows.quarantined),
        f" ({why})" if why else "",
    )
    if made.replaced:
        logger.info(
            "night %s: %d rows left the table with the restated days they had come with", made.night, made.replaced
        )


def _record(batch: Batch | SpilledBatch, plan: Plan, numbers: Numbers, night: str) -> Commit:
    settled = plan.settled
    return Commit(
        number=numbers.own,
        delta_version=-1,  # known only once committed; the log says it
        night=night,
        feed=batch.feed,
        rows=plan.rows,
        updated=plan.updated,
        labels_changed_after_supervision=plan.labels_changed,
        reasons=_reasons(plan.quarantine),
        action_rows=settled.counts if settled is not None else None,
        action_reasons=_reasons(settled.quarantine) if settled is not None else {},
        missing_side=dict(plan.counts.missing_side),
        outside_window=plan.counts.outside_window,
        bad_action_times=plan.counts.bad_action_times,
        unknown_columns=dict(batch.unknown_columns),
        figures=dict(batch.figures),
        inputs=dict(batch.inputs),
        numbers={
            day: [*numbers.before[day], number] for day, number in zip(numbers.before, numbers.days, strict=False)
        },
        restated=batch.restated,
        replaced=plan.replaced,
    )


def _reasons(rows: pl.DataFrame) -> dict[str, int]:
    counts = rows.group_by("reason").len().sort("reason")
    return {reason: int(count) for reason, count in counts.iter_rows()}


def _written_schema(table: DeltaTable, config: Config) -> pa.Schema:
    """Return the columns to write: the config's, then those only the table has (written null)."""
    wanted = event_schema(config.source.action_names, config.source.side_features)
    there = layout.schema_of(table)
    return pa.schema([*wanted, *(there.field(name) for name in there.names if name not in wanted.names)])


def _with_erased(table: DeltaTable, keep_versions: Iterable[int]) -> set[int]:
    """Return versions to keep, with the one that is read in place of older ones (`pin`, `erasure.readable`)."""
    kept, erased = set(keep_versions), table.transaction_version(erasure.ERASED_AT)
    if erased is not None and any(version < erased for version in kept):
        kept.add(erased)
    return kept
