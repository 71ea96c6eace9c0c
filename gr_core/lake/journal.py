"""The journal: an append-only Delta table of nights and decisions, the one truth about both.

One entry is one commit under one application transaction ("journal", seq), so the table's order is the
compare-and-set: of two writers who have read the same state, one loses, reloads and takes the next number. Kinds
and payloads of entries stand in gr_core.lake.entries; the pure functions that fold entries into nights, champion
and bounds stand in gr_core.lake.ledger. Both are offered here too.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from gr_core.errors import CommitConflict, FormatError, UsageError
from gr_core.formats import JOURNAL_FORMAT, check_format
from gr_core.lake import deltalog, store
from gr_core.lake.entries import (
    KINDS,
    Attempt,
    Decided,
    Entry,
    Failed,
    Finished,
    Ingested,
    Moved,
    Opened,
    Parent,
    Registered,
)
from gr_core.lake.ledger import (
    Champion,
    NightRecord,
    Version,
    bound_nights_ago,
    challenger,
    champion,
    finished_bounds,
    nights,
    previous,
    versions,
)
from gr_core.lake.moved import rebased

__all__ = [
    "Attempt",
    "Champion",
    "Decided",
    "Entry",
    "Failed",
    "Finished",
    "Ingested",
    "Journal",
    "JournalMoved",
    "Moved",
    "NightRecord",
    "Opened",
    "Parent",
    "Registered",
    "Version",
    "bound_nights_ago",
    "challenger",
    "champion",
    "finished_bounds",
    "nights",
    "previous",
    "versions",
]

APP = "journal"
_PLACE = "/lake/journal"  # in a home
SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("at_us", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("night", pa.string(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
    ]
)
# Each entry is a file of its own; past this many, reading is slower than merging them once.
_MAX_FILES = 48
_MAX_ATTEMPTS = 100
# Commits between checkpoints of Delta's log (its own default: 100): each read asks for every log file since the last.
_CHECKPOINT = "24"

_UNTOUCHED = "the event table, checkpoints and models are untouched"

_MAX_KNOWN = 4 * _MAX_FILES
_known: dict[str, bytes] = {}

logger = logging.getLogger(__name__)


class JournalMoved(CommitConflict):
    """The journal has an entry that the writer had not read; read again, then decide again."""


class Journal:
    """The journal at a URI. Holds no state: each call reads what is there now.

    Args:
        uri: Directory of the Delta table; it is created by the first append, never by reading.
        storage_options: Passed to deltalake; None: those of the environment for an object store, whose conditional
            put of the next log file is what makes one of two writers lose.

    Raises:
        UsageError: The path has characters that Delta Lake cannot have in it.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.uri = uri
        self._table_uri = store.delta_uri(uri)
        self._options = dict(storage_options) if storage_options else store.storage_options(uri)

    def entries(self) -> list[Entry]:
        """Return all entries in order; an empty list, and nothing written, where there is no table.

        Raises:
            FormatError: A file of the journal is damaged or missing, or another release's; it is named.
            ConfigError: Credentials, rights or the bucket of an object store.
            StoreUnavailable: The object store did not answer.
        """
        with store.answering(self.uri):
            table = self._load()
            return [] if table is None else self._placed(self._read(table))

    def append(
        self, kind: str, night: str, payload: Mapping[str, Any], *, at_us: int, expect: int | None = None
    ) -> Entry:
        """Append one entry in one commit.

        Args:
            kind: One of entries.KINDS.
            night: Key of the night: its date or the attempt's name.
            payload: The kind's payload; numpy scalars are unwrapped, NaN and infinities become null.
            at_us: The time of the entry, microseconds since the epoch.
            expect: Newest seq the writer has read (0: none). None: append whatever came before.

        Returns:
            The entry as written, with its number.

        Raises:
            UsageError: Unknown kind or empty night.
            FormatError: A file of the journal is damaged or missing, or another release's; it is named.
            JournalMoved: With `expect`, the journal has moved on; nothing is written.
            CommitConflict: Without `expect`, other writers won every attempt.
            ConfigError: Credentials, rights or the bucket of an object store.
            StoreUnavailable: The object store did not answer.
        """
        if kind not in KINDS or not night:
            raise UsageError(f"journal entry needs a night and a kind of {list(KINDS)}, got {kind!r}, {night!r}")
        text = json.dumps(_plain(payload), sort_keys=True, allow_nan=False)
        with store.answering(self.uri):
            for attempt in range(_MAX_ATTEMPTS):
                table = self._load() or self._create()
                newest = table.transaction_version(APP) or 0
                if expect is not None and newest != expect:
                    raise JournalMoved(
                        f"journal is at entry {newest}, expected {expect}; read it again and decide again",
                        where=self.uri,
                    )
                entry = Entry(seq=newest + 1, at_us=at_us, kind=kind, night=night, payload=json.loads(text))
                if self._commit(table, entry, text) or self._is_ours(entry):
                    self._compact(table, entry.seq)
                    return entry
                time.sleep(min(0.05, 0.002 * attempt))
        raise CommitConflict(
            f"no journal entry could be committed in {_MAX_ATTEMPTS} attempts; stop other writers", where=self.uri
        )

    def _placed(self, entries: list[Entry]) -> list[Entry]:
        """Return entries that name files where the home lies now."""
        home = self.uri.rstrip("/").removesuffix(_PLACE)
        if not self.uri.rstrip("/").endswith(_PLACE):
            return entries  # a journal by itself
        return [replace(entry, payload=rebased(entry.payload, home)) for entry in entries]

    def _load(self) -> DeltaTable | None:
        try:
            table = DeltaTable(self._table_uri, storage_options=self._options)
        except TableNotFoundError:
            deltalog.refuse_lost_log(self.uri, "journal", untouched=_UNTOUCHED)
            return None
        except DeltaError as error:
            if store.named(self.uri, error) is not None:
                raise
            raise deltalog.unreadable(self.uri, "journal", error, untouched=_UNTOUCHED) from error
        deltalog.refuse_lost_commits(self.uri, table.version(), "journal", untouched=_UNTOUCHED)
        # journals of the first releases do not say it
        told = json.loads(table.metadata().description or "{}").get("format", 1)
        check_format("journal", self.uri, told, JOURNAL_FORMAT, "use the release that wrote it, or a new home")
        return table

    def _create(self) -> DeltaTable:
        try:
            return DeltaTable.create(
                self._table_uri,
                schema=SCHEMA,
                description=json.dumps({"format": JOURNAL_FORMAT}),
                configuration={"delta.checkpointInterval": _CHECKPOINT},
                storage_options=self._options,
            )
        except DeltaError as error:
            if store.named(self.uri, error) is not None:
                raise
            # Another process was faster; where it was not, loading names the real trouble.
            return DeltaTable(self._table_uri, storage_options=self._options)

    def _commit(self, table: DeltaTable, entry: Entry, text: str) -> bool:
        """Write one entry; False where another writer took its number."""
        row = {"seq": entry.seq, "at_us": entry.at_us, "kind": entry.kind, "night": entry.night, "payload": text}
        rows = pa.Table.from_pylist([row], schema=SCHEMA)
        transaction = CommitProperties(app_transactions=[Transaction(APP, entry.seq)])
        try:
            write_deltalake(table, rows, mode="append", commit_properties=transaction)
        except CommitFailedError as error:
            if store.named(self.uri, error) is not None:
                raise
            return False
        return True

    def _is_ours(self, entry: Entry) -> bool:
        """Tell whether the entry that took the number is this very one: an object store's answer may get lost."""
        if store.is_local(self.uri):
            return False
        table = self._load()
        return table is not None and entry in self._read(table)

    def _read(self, table: DeltaTable) -> list[Entry]:
        """Read all entries; their numbers run from 1 without a gap, or the log has lost one."""
        files = [store.delta_file(uri) for uri in table.file_uris()]
        try:
            contents = _contents(files)
        except FileNotFoundError as error:
            gone = next((file for file in files if not store.exists(file)), self.uri)
            raise deltalog.damaged_data(gone, "journal", error, untouched=_UNTOUCHED) from error
        rows = [row for file, content in zip(files, contents, strict=True) for row in _rows(file, content)]
        rows.sort(key=lambda row: row["seq"])
        found, newest = [row["seq"] for row in rows], table.transaction_version(APP) or 0
        lost = sorted(set(range(1, newest + 1)) - set(found))
        if lost:
            raise FormatError(
                f"the journal {self.uri} has lost its entries {lost} of {newest}: files of its _delta_log were emptied or "
                f"replaced; restore _delta_log from a backup ({_UNTOUCHED}), or start a new home with --home",
                where=self.uri,
            )
        return [Entry(**{**row, "payload": json.loads(row["payload"])}) for row in rows]

    def _compact(self, table: DeltaTable, seq: int) -> None:
        """Merge the small files now and then; contents and order stay, and losing a race is no loss."""
        if seq % _MAX_FILES:
            return
        try:
            table.update_incremental()
            table.optimize.compact()
        except (DeltaError, OSError) as error:
            logger.info("journal %s not compacted this time: %s", self.uri, store.named(self.uri, error) or error)


def _rows(file: str, content: bytes) -> list[dict[str, Any]]:
    # Not to_pyarrow_table(): with many files its reader threads abort the interpreter at exit (deltalake 1.6.6).
    try:
        rows: list[dict[str, Any]] = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise deltalog.damaged_data(file, "journal", error, untouched=_UNTOUCHED) from error
    return rows


def _contents(files: list[str]) -> list[bytes]:
    """Read data files; those of an object store once a process, since one that is there never changes."""
    if any(store.is_local(uri) for uri in files):
        return store.read_all(files)
    missing = [uri for uri in files if uri not in _known]
    found = dict(zip(missing, store.read_all(missing), strict=True))
    contents = [found.get(uri) or _known[uri] for uri in files]
    _known.update(found)
    while len(_known) > _MAX_KNOWN:
        _known.pop(next(iter(_known)), None)
    return contents


def _plain(value: Any) -> Any:
    """Return JSON values only: numpy scalars unwrapped, non-finite numbers as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
