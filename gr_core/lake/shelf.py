"""Frames put aside by bucket and taken back one bucket at a time: in memory while few rows, else on local disk.

What a large ingestion reads is split here, so that the work after it needs the memory of a bucket and not of the day.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import polars as pl

LIMIT = 2_000_000  # rows held in memory; a day below it never touches the disk
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
        self.rows = 0
        self.buckets: set[int] = set()
        self._key, self._limit = key, LIMIT if limit is None else limit
        self._held: list[pl.DataFrame] = []
        self._split: dict[int, pl.DataFrame] | None = None
        self._folder: Path | None = None
        self._files: dict[int, list[Path]] = {}

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
        if self.spilled or self.rows > self._limit:
            self._spill()

    def whole(self) -> pl.DataFrame:
        """Return all rows, in the order they were added while in memory."""
        if self.spilled:
            return pl.concat([self._empty, *(self.take(bucket) for bucket in sorted(self.buckets))])
        return pl.concat([self._empty, *self._held])

    def take(self, bucket: int) -> pl.DataFrame:
        """Return a bucket's rows; they stay on the shelf."""
        if not self.spilled:
            if self._split is None:
                parts = self.whole().partition_by(self._key, as_dict=True, maintain_order=True)
                self._split = {int(key[0]): part for key, part in parts.items()}
            return self._split.get(bucket, self._empty)
        files = self._files.get(bucket % _GROUPS, [])
        found = pl.concat([self._empty, *(pl.read_ipc(file) for file in files)])
        return found.filter(pl.col(self._key) == bucket) if self._shared(bucket) else found

    def _shared(self, bucket: int) -> bool:
        return any(other % _GROUPS == bucket % _GROUPS for other in self.buckets if other != bucket)

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="daybreak-shelf-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        for frame in self._held:
            grouped = frame.with_columns((pl.col(self._key) % _GROUPS).alias(_GROUP))
            for (group,), part in grouped.partition_by(_GROUP, as_dict=True, include_key=False).items():
                files = self._files.setdefault(int(group), [])
                file = self._folder / f"{group}-{len(files)}.arrow"
                part.write_ipc(file, compression="uncompressed")
                files.append(file)
        self._held = []
