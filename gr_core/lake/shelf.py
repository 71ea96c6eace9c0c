"""Frames put aside by bucket and taken back one bucket at a time: in memory while few rows, else on local disk.

What a large ingestion reads is split here, so that the work after it needs the memory of a bucket and not of the day.
The rows are people's, and the disk is outside the home: they lie in a file without a name, which the operating system
frees with the process, however that ends.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref
from collections.abc import Iterable
from threading import Thread
from typing import IO

import polars as pl
import pyarrow as pa

LIMIT = 2_000_000  # rows held in memory; a day below it never touches the disk
_CHUNK = 2**19  # rows that go to disk together
_GROUP = "\x00group"
_GROUPS = 64  # pieces an addition makes at most: with more buckets some share a piece
_ALIGNED = 64  # bytes; Arrow reads what begins there without a copy


class Shelf:
    """Rows of one schema by an integer column; rows of a bucket come back in the order they were added.

    Args:
        schema: The frames' columns.
        key: The column that holds the bucket.
        limit: Rows held in memory before all go to a temporary file, which goes with the shelf; default LIMIT.
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
        self._file: IO[bytes] | None = None
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # of a group: first byte and the one after the last
        self._writer: Thread | None = None
        self._failed: BaseException | None = None

    @property
    def spilled(self) -> bool:
        """Whether the rows lie on disk."""
        return self._file is not None

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
        if self._file is None:
            if self._split is None:
                parts = self.whole().partition_by(self._key, as_dict=True, maintain_order=True)
                self._split = {int(key[0]): part for key, part in parts.items()}
            return self._split.get(bucket, self._empty)
        self._spill()
        self._settle()
        named = {plain: name for name, plain in self._plain.items()}
        pieces = _mapped(self._file, self._pieces.get(bucket % _GROUPS, []))
        found = pl.concat([self._empty, *(piece.rename(named, strict=False) for piece in pieces)], how="diagonal")
        # one piece a column: what is gathered from many is gathered slowly
        return found.filter(pl.col(self._key) == bucket) if self._shared(bucket) else found.rechunk()

    def _shared(self, bucket: int) -> bool:
        return any(other % _GROUPS == bucket % _GROUPS for other in self.buckets if other != bucket)

    def _spill(self) -> None:
        """Write what is held to the file, beside what the caller does next."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the shelf
            weakref.finalize(self, self._file.close)
        if self._held:
            self._settle()
            self._writer = Thread(target=self._write, args=(self._held, self._file), name="daybreak-shelf")
            self._writer.start()
        self._held, self._waiting = [], 0

    def _settle(self) -> None:
        """Wait until all that was spilled is written; raises what stopped it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failed is not None:
            raise self._failed

    def _write(self, held: list[pl.DataFrame], file: IO[bytes]) -> None:
        try:
            frame = pl.concat(held)
            frame = frame.drop(name for name in frame.columns if frame[name].null_count() == frame.height)
            grouped = frame.with_columns((pl.col(self._key) % _GROUPS).alias(_GROUP))
            for (group,), part in grouped.partition_by(_GROUP, as_dict=True, include_key=False).items():
                start = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
                # Arrow's C interface cuts a name at a NUL, which the working columns' names start with
                part.rename(self._plain, strict=False).write_ipc(file, compression="uncompressed")
                self._pieces.setdefault(int(group), []).append((start, file.tell()))
        except BaseException as error:  # noqa: BLE001 -- raised where the rows are asked for
            self._failed = error


def _mapped(file: IO[bytes], pieces: Iterable[tuple[int, int]]) -> list[pl.DataFrame]:
    """Read pieces of a file, which is not empty, without a copy: its pages are the frames'."""
    content = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    found = (pl.from_arrow(pa.ipc.open_file(content.slice(start, end - start)).read_all()) for start, end in pieces)
    return [frame for frame in found if isinstance(frame, pl.DataFrame)]
