"""Versions of the event table and what its log tells of them: opened by number, commits found without a walk.

A night is found by its app transaction, whose number leads to the one log entry that holds the commit's record, so
looking a night up costs the same at any age of the table.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from gr_core.config import Config
from gr_core.errors import ConfigError, FormatError, StoreUnavailable
from gr_core.formats import check_format
from gr_core.lake import deltalog, pending, quarantine, store
from gr_core.lake.commits import COMMIT_KEY, INGEST, Commit
from gr_core.lake.events import books, erasure, layout
from gr_core.schema import EVENT_FORMAT, event_schema

logger = logging.getLogger("gr_core.lake.events")

NIGHT = "night-"  # app transaction of a night: its commit's number
PLACE = "commit-"  # of a commit: the lowest Delta version that it can have made
RESTATED = "day-"  # of a feed day that was read again: the number of the commit that did so last


class Versions:
    """A table's versions; `EventTable` is the public face.

    Args:
        uri: The table; the quarantine lies beside it.
        config: The run's config; its `lake` must be the one the table was made with.
        up_to: Reads leave out rows of greater commits.

    Raises:
        UsageError: The path has characters that Delta Lake cannot have in it.
    """

    def __init__(self, uri: str, config: Config, *, up_to: int | None = None) -> None:
        self.uri = uri.rstrip("/")
        self._table_uri = store.delta_uri(self.uri)
        self._options = store.storage_options(self.uri)
        self.config = config
        self.up_to = up_to
        self.lake = self.uri.rsplit("/", 1)[0]
        self.quarantine_uri = store.join(self.lake, "quarantine")
        self.pending_uri = store.join(self.lake, "pending")

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
        last = 0 if table is None else table.transaction_version(INGEST) or 0
        found = [self._commit(table, number) for number in range(1, last + 1) if table is not None]
        return [commit for commit in found if commit is not None]

    def check_rows(self) -> int:
        """Check the accounting of the whole table: rows committed, less rows removed = rows held; reads the log alone.

        Returns:
            The number of rows; 0 where there is no table.

        Raises:
            FormatError: They differ, and a file of the log is damaged, such as one that a crash of the machine emptied.
            AssertionError: They differ otherwise (a fault of ours, never of the data).
        """
        table = self._open()
        try:
            return 0 if table is None else books.check(table)
        except AssertionError:
            deltalog.refuse_damaged(self.uri, layout.WHAT, untouched=layout.UNTOUCHED)
            raise

    def last_commit(self) -> Commit | None:
        """Return the newest commit; None where nothing was ingested."""
        table = self._open()
        number = None if table is None else table.transaction_version(INGEST)
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

    def pending(self, commit: int) -> pl.DataFrame:
        """Return the action rows that wait after a commit (`joining.WAITING`); none for commits the table lacks."""
        table = self._open()
        found = None if table is None else self._commit(table, commit)
        return pending.read(self.pending_uri, found.pending if found else "")

    def delivered(self, day: str) -> tuple[str, list[int]]:
        """Tell how a feed day was delivered last: the digest of its files, and all numbers its rows came under.

        Args:
            day: The feed day (ISO), which is also the name of its night.

        Returns:
            "" and no number for a day that was never ingested.
        """
        table = self._open()
        if table is None:
            return "", []
        number = table.transaction_version(f"{RESTATED}{day}")
        record = self._find(table, day) if number is None else self._commit(table, number)
        if record is None:
            return "", []
        return record.inputs.get(day, ""), record.numbers.get(day, [record.number])

    def at(self, delta_version: int | None = None) -> DeltaTable | None:
        """Open a version (None: the newest) for `gr_core.lake.events.erasure`; None where there is no table."""
        return self._open(delta_version)

    def _find(self, table: DeltaTable, night: str) -> Commit | None:
        number = table.transaction_version(f"{NIGHT}{night}")
        return None if number is None else self._commit(table, number)

    def _commit(self, table: DeltaTable, number: int) -> Commit | None:
        """Read a commit's record from the log, without a walk through it; None where the table has no such commit."""
        version = table.transaction_version(f"{PLACE}{number}")
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
            with store.answering(self.uri):
                table = DeltaTable(self._table_uri, version=version, storage_options=self._options)
        except TableNotFoundError:
            deltalog.refuse_lost_log(self.uri, layout.WHAT, untouched=layout.UNTOUCHED)
            return None
        except DeltaError as error:
            raise self._unreadable(version, error) from error
        deltalog.refuse_lost_commits(self.uri, int(table.version()), layout.WHAT, untouched=layout.UNTOUCHED)
        told = json.loads(table.metadata().description or "{}")
        remedy = "use the release that wrote it, or a new home"
        check_format("event table", self.uri, told.get("format"), EVENT_FORMAT, remedy)
        if told["lake"] != _lake_identity(self.config):
            raise ConfigError(
                f"lake: the table at {self.uri} was made with {told['lake']}, the config says "
                f"{_lake_identity(self.config)}; lake never changes in a home: set it back or use another home",
                where="lake",
            )
        return table

    def _unreadable(self, version: int | None, error: DeltaError) -> FormatError:
        """Return what keeps a version from being opened: a damaged file of the log, else that there is no such version."""
        newest = deltalog.newest_commit(self.uri)
        if version is not None and version > newest:
            return FormatError(
                f"{self.uri} has no version {version} of the event table, its newest is {newest}; restore the table from "
                "the same backup as the journal",
                where=self.uri,
            )
        return deltalog.unreadable(self.uri, layout.WHAT, error, untouched=layout.UNTOUCHED)

    def _create(self) -> DeltaTable:
        """Open the table, making it where there is none; the version it is made at holds no commit of ours.

        Columns that the config has gained are added first, by a Delta version of their own without rows: the merge
        of deltalake 1.6.6 with merge_schema nulls the columns of the rows that it only copies.
        """
        source = self.config.source
        table = self._open()
        if table is not None:
            there = layout.schema_of(table).names
            wanted = event_schema(source.action_names, source.side_features)
            gained = pa.schema([item for item in wanted if item.name not in there])
            if gained.names:
                table.alter.add_columns(list(Schema.from_arrow(gained).fields))
            return table
        try:
            with store.answering(self.uri):
                DeltaTable.create(
                    self._table_uri,
                    event_schema(source.action_names, source.side_features),
                    mode="ignore",
                    partition_by=["bucket"],
                    name="daybreak-events",
                    description=json.dumps({"format": EVENT_FORMAT, "lake": _lake_identity(self.config)}),
                    # nights are found in the log for good, whatever its age
                    configuration={"delta.enableExpiredLogCleanup": "false", "delta.checkpointInterval": "20"},
                    storage_options=self._options,
                )
        except CommitFailedError:
            logger.info("another writer made the event table %s at the same moment", self.uri)
            raise
        table = self._open()
        if table is None:
            raise StoreUnavailable(f"{self.uri}: the event table was made but cannot be opened", where=self.uri)
        return table

    def _unanswered(self, error: DeltaError) -> None:
        """Raise what an object store refused by its name; nothing happens where it is no trouble of a store's."""
        told = store.named(self.uri, error)
        if told is not None:
            raise told from None  # the cause may quote a credential


def _commit_info(uri: str, version: int) -> dict[str, Any]:
    """Return what one Delta version's own log entry tells of itself: a read of one small file, at any age."""
    why = "it tells nothing of its commit"
    try:
        content = store.read_bytes(store.join(uri, deltalog.LOG, deltalog.commit_name(version)))
        actions = [json.loads(line) for line in content.splitlines() if line.startswith(b'{"commitInfo"')]
        if actions:
            return dict(actions[0]["commitInfo"])
    except FileNotFoundError:
        why = "it is missing"
    except ValueError as error:
        why = f"it is damaged: {error}"
    raise deltalog.damaged_entry(uri, version, layout.WHAT, why, untouched=layout.UNTOUCHED)


def _lake_identity(config: Config) -> dict[str, Any]:
    lake = config.lake
    return {"zone": lake.zone, "num_buckets": lake.num_buckets, "holdout_fraction": lake.holdout_fraction}
