"""Frames put aside by bucket and taken back one bucket at a time: in memory while few rows, else on local disk.

What a large ingestion reads is split here, so that the work after it needs the memory of a bucket and not of the day.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from threading import Thread

import polars as pl
import pyarrow as pa

LIMIT = 2_000_000  # rows held in memory; a day below it never touches the disk
_CHUNK = 2**19  # rows that go to disk together
_GROUP = "\x00group"
_GROUPS = 64  # files an addition makes at most: with more buckets some share a file


class Shelf:
    """Rows of one schema by an integer column; rows of a bucket come back in the order they were added.

    Args:
        schema: The frames' columns.
        key: The column that holds the bucket.
        limit: Rows held in memory before all go to a temporary folder, which goes with the shelf; default LIMIT.
    """

    def __init__(self, schema: pl.Schema, key: str = "bucket", limit: int | None = None) -> None:
        self.schema = schema
        self._empty = schema.to_frame()
        self._plain = {name: str(place) for place, name in enumerate(schema.names())}
        self.rows = 0
        self.buckets: set[int] = set()
        self._key, self._limit = key, LIMIT if limit is None else limit
        self._waiting = 0  # rows held
        self._held: list[pl.DataFrame] = []
        self._split: dict[int, pl.DataFrame] | None = None
        self._folder: Path | None = None
        self._files: dict[int, list[Path]] = {}
        self._writer: Thread | None = None
        self._failed: BaseException | None = None

    @property
    def spilled(self) -> bool:
        """Whether the rows lie on disk."""
        return self._folder is not None

    def add(self, frame: pl.DataFrame) -> None:
        """Put rows aside; their columns are the schema's, in its order."""
        if frame.is_empty():
            return
        self.rows += frame.height
        self.buckets.update(frame[self._key].unique().to_list())
        self._held.append(frame)
        self._split = None
        self._waiting += frame.height
        if self.rows > self._limit and (not self.spilled or self._waiting >= _CHUNK):
            self._spill()

    def whole(self) -> pl.DataFrame:
        """Return all rows, in the order they were added while in memory."""
        if self.spilled:
            self._spill()
            return pl.concat([self._empty, *(self.take(bucket) for bucket in sorted(self.buckets))])
        return pl.concat([self._empty, *self._held])

    def take(self, bucket: int) -> pl.DataFrame:
        """Return a bucket's rows; they stay on the shelf."""
        if not self.spilled:
            if self._split is None:
                parts = self.whole().partition_by(self._key, as_dict=True, maintain_order=True)
                self._split = {int(key[0]): part for key, part in parts.items()}
            return self._split.get(bucket, self._empty)
        self._spill()
        self._settle()
        files = self._files.get(bucket % _GROUPS, [])
        named = {plain: name for name, plain in self._plain.items()}
        found = pl.concat([self._empty, *(_mapped(file).rename(named, strict=False) for file in files)], how="diagonal")
        # one piece a column: what is gathered from many is gathered slowly
        return found.filter(pl.col(self._key) == bucket) if self._shared(bucket) else found.rechunk()

    def _shared(self, bucket: int) -> bool:
        return any(other % _GROUPS == bucket % _GROUPS for other in self.buckets if other != bucket)

    def _spill(self) -> None:
        """Write what is held to the folder, beside what the caller does next."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="daybreak-shelf-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if self._held:
            self._settle()
            self._writer = Thread(target=self._write, args=(self._held, self._folder), name="daybreak-shelf")
            self._writer.start()
        self._held, self._waiting = [], 0

    def _settle(self) -> None:
        """Wait until all that was spilled is written; raises what stopped it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failed is not None:
            raise self._failed

    def _write(self, held: list[pl.DataFrame], folder: Path) -> None:
        try:
            frame = pl.concat(held)
            frame = frame.drop(name for name in frame.columns if frame[name].null_count() == frame.height)
            grouped = frame.with_columns((pl.col(self._key) % _GROUPS).alias(_GROUP))
            for (group,), part in grouped.partition_by(_GROUP, as_dict=True, include_key=False).items():
                files = self._files.setdefault(int(group), [])
                file = folder / f"{group}-{len(files)}.arrow"
                # Arrow's C interface cuts a name at a NUL, which the working columns' names start with
                part.rename(self._plain, strict=False).write_ipc(file, compression="uncompressed")
                files.append(file)
        except BaseException as error:  # noqa: BLE001 -- raised where the rows are asked for
            self._failed = error


def _mapped(file: Path) -> pl.DataFrame:
    """Read a file without a copy: its pages are the frame's."""
    with pa.memory_map(str(file)) as source:
        found = pl.from_arrow(pa.ipc.open_file(source).read_all())
    assert isinstance(found, pl.DataFrame)
    return found
