"""Data files of the event table: how rows are laid out in them, and the one commit that makes them visible.

Rows lie sorted by (user_id, shown_at, event_id) in small row groups, so that a few users' rows are read without the
rest, and in one file only with rows of about the same time (`lake.clusters`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from gr_core.lake import store
from gr_core.lake.clusters import RECENT_US, clusters_of

logger = logging.getLogger("gr_core.lake.events")

FILE_ROWS = 2**20
_CLUSTER = "\x00cluster"
_ROW_GROUPS = ((2**16, 4096), (2**18, 8192), (FILE_ROWS, 16_384))  # rows of a file up to ..., rows of a row group
_WRITERS = 2  # files written at a time
_STATISTICS = ("user_id", "shown_at", "commit", "updated")


def clusters(rows: pl.DataFrame, recent_us: int = RECENT_US) -> Iterator[pl.DataFrame]:
    """Split rows by (user_id, shown_at, event_id) into those of one file each, see `lake.clusters`; order is kept."""
    found = pl.Series(_CLUSTER, clusters_of(rows["shown_at"].to_physical().to_numpy(), recent_us))
    split = rows.with_columns(found).partition_by(_CLUSTER, as_dict=True, include_key=False, maintain_order=True)
    for key in sorted(split):
        yield from split[key].iter_slices(FILE_ROWS)


def files_of_clusters(rows: pl.DataFrame, found: pl.Series) -> Iterator[pl.DataFrame]:
    """Cut rows that lie by cluster already into those of one file each.

    Args:
        rows: By cluster, then by (user_id, shown_at, event_id).
        found: Each row's cluster.
    """
    start = 0
    for length in found.rle().struct.field("len"):
        yield from rows.slice(start, length).iter_slices(FILE_ROWS)
        start += length


class Writing:
    """The files of one Delta version that is not committed yet; nobody sees them before `commit`.

    Args:
        table: Open at the version that the new one is worked out from.
        uri: The table.
        schema: Columns to write; a column that rows do not have is written null.
    """

    def __init__(self, table: DeltaTable, uri: str, schema: pa.Schema) -> None:
        self._table, self._uri = table, uri
        self._schema = pa.schema([field for field in schema if field.name != "bucket"])
        empty = pl.from_arrow(pa.Table.from_batches([], schema=self._schema))
        assert isinstance(empty, pl.DataFrame)
        self._types = empty.schema
        self._whole = schema
        self._paths: list[str] = []
        self._adds: list[AddAction] = []
        self._removes: list[RemoveAction] = []
        self._now_ms = 0
        self._pool = ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="daybreak-write")
        self._waiting: deque[Future[AddAction]] = deque()
        self.bytes = 0
        """Bytes of the files written, once committed."""

    def add(self, bucket: int, rows: pl.DataFrame, *, data_change: bool = True) -> None:
        """Write one file of a bucket, beside what the caller does next; rows are by (user_id, shown_at, event_id)."""
        path = f"bucket={bucket}/{uuid.uuid4().hex}.parquet"  # two writers never meet in a name
        self._paths.append(path)
        self._waiting.append(self._pool.submit(self._write, path, bucket, rows, data_change=data_change))
        while len(self._waiting) > 2 * _WRITERS:
            self._adds.append(self._waiting.popleft().result())

    def remove(self, path: str, bucket: int, size: int, *, data_change: bool = True) -> None:
        """Take a file out of the table."""
        self._removes.append(RemoveAction(path, data_change, self._stamp(), size, {"bucket": str(bucket)}))

    def commit(self, properties: CommitProperties) -> None:
        """Make all of it visible as one version.

        Raises:
            CommitFailedError: Another writer changed the table since; nothing of this is visible.
        """
        try:
            self._finish()
        except BaseException:  # a file that could not be written: nothing was asked of the table yet
            self.discard()
            raise
        self._table.create_write_transaction(
            [*self._adds, *self._removes], "append", self._whole, ["bucket"], commit_properties=properties
        )

    def discard(self) -> None:
        """Delete what was written, after a failure; what a killed process leaves is removed by vacuum."""
        self._pool.shutdown(cancel_futures=True)
        for path in self._paths:
            store.remove(store.join(self._uri, path))

    def _finish(self) -> None:
        """Wait for the files that are being written; raises what stopped one of them."""
        while self._waiting:
            self._adds.append(self._waiting.popleft().result())
        self._pool.shutdown()
        self.bytes = sum(action.size for action in self._adds)

    def _write(self, path: str, bucket: int, rows: pl.DataFrame, *, data_change: bool) -> AddAction:
        frame = rows.select(
            (pl.col(name) if name in rows.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in self._types.items()
        )
        uri = store.join(self._uri, path)
        groups = next((size for most, size in _ROW_GROUPS if frame.height <= most), _ROW_GROUPS[-1][1])
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "row_group_size": groups}
        if store.is_local(uri):
            target = store.local_path(uri)
            with store.writable(uri):
                target.parent.mkdir(parents=True, exist_ok=True)
                frame.write_parquet(target, **options)
            stat = target.stat()
            size, self._now_ms = stat.st_size, stat.st_mtime_ns // 1_000_000
        else:
            content = BytesIO()
            frame.write_parquet(content, **options)
            store.write_bytes(uri, content.getvalue())
            size = content.tell()
        return AddAction(path, size, {"bucket": str(bucket)}, self._stamp(), data_change, _told(frame))

    def _stamp(self) -> int:
        """Return the moment Delta notes beside an action, for retention: the newest that the table or a file tells."""
        if self._now_ms == 0:
            told = self._table.history(1)
            self._now_ms = int(told[0].get("timestamp", 0)) if told else 0
        return self._now_ms


def _told(frame: pl.DataFrame) -> str:
    """Return a file's statistics as Delta keeps them."""
    named = [name for name in _STATISTICS if name in frame.columns]
    low, high = (
        frame.select(getattr(pl.col(name), what)() for name in named).row(0, named=True) for what in ("min", "max")
    )
    nulls = {name: int(frame[name].null_count()) for name in named}
    told = {"numRecords": frame.height, "minValues": _plain(low), "maxValues": _plain(high), "nullCount": nulls}
    # no \u escapes: deltalake reads pairs of them wrongly from U+20000 on, and passes over files of such users
    return json.dumps(told, ensure_ascii=False)


def _plain(values: dict[str, object]) -> dict[str, object]:
    shown = values.get("shown_at")
    if shown is None:
        return values
    return {**values, "shown_at": shown.isoformat().replace("+00:00", "Z")}  # type: ignore[attr-defined]
