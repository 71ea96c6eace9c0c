"""Generations of the history store: immutable files of many users' entries, each user's in two ranges.

A generation is a data file and an index. The data file holds the records of all rows, then their texts end to end; the
index, by key, where a user's records and texts lie, a checksum over them, and his floor.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np

from gr_core.atomic import write_whole
from gr_core.errors import FormatError
from gr_core.lake import store
from gr_core.lake.history_entries import KEY, Array, Entries, HistoryColumns, Longs, is_wide, kept_times, record_type
from gr_core.refs import Ref

_PLACE = np.dtype(
    [
        ("low", "<u4"),
        ("row", "<u4"),
        ("rows", "<u4"),
        ("text_len", "<u4"),
        ("check", "<u4"),
        ("text", "<u8"),
        ("floor", "<i8"),
    ]
)
_NEAR = 32_768  # bytes of a gap that cost less to read than another request to an object store


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation(Ref):
    """What a manifest says of one generation."""

    name: str
    """Files <name>.data and <name>.index below the bucket's folder."""
    level: int
    """0: written by a night; a level's generations are merged into one of the next."""
    users: int
    """Entries, heads and deep ones."""
    rows: int
    text_at: int
    """Bytes of records, so the offset of the texts."""
    data_bytes: int
    index_bytes: int
    index_check: int
    """CRC-32 of the index file."""
    wide: bool
    """Text lengths are uint32 instead of uint16."""
    times: tuple[str, ...]
    """Action times that any of the rows has; the others are null."""
    live_users: int
    """Entries without a newer one."""
    live_bytes: int
    """Data bytes of their entries."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Generation:
        """Build from plain JSON values."""
        names = cls.__dataclass_fields__
        known = {key: value for key, value in values.items() if key in names}
        return cls(**{**known, "times": tuple(known["times"])})


def write(folder: str, name: str, level: int, entries: Entries, columns: HistoryColumns) -> Generation:
    """Write a generation's data and index, each whole or not at all.

    Args:
        folder: URI of the bucket's folder.
        name: Names the files; never used before.
        level: The generation's level.
        entries: What to write, one entry a user.
        columns: What is kept.

    Returns:
        What a manifest says of it; all its entries are live.
    """
    records = memoryview(entries.records.view(np.uint8).data)
    row_at = np.cumsum(entries.rows) - entries.rows
    text_at = np.cumsum(entries.text_lens) - entries.text_lens
    index = np.empty(len(entries.keys), dtype=_PLACE)
    index["low"], index["floor"] = entries.keys["low"], entries.floors
    index["row"], index["rows"] = row_at, entries.rows
    index["text"], index["text_len"] = text_at, entries.text_lens
    size = entries.records.dtype.itemsize
    index["check"] = _checks(records, row_at * size, entries.rows * size, memoryview(entries.texts), index)
    order = np.argsort(entries.keys["high"], kind="stable")
    content = np.ascontiguousarray(entries.keys["high"][order]).tobytes() + index[order].tobytes()
    _write_file(store.join(folder, f"{name}.data"), [records, entries.texts])
    _write_file(store.join(folder, f"{name}.index"), [content])
    total = records.nbytes + memoryview(entries.texts).nbytes
    return Generation(
        name=name,
        level=level,
        users=len(index),
        rows=len(entries.records),
        text_at=records.nbytes,
        data_bytes=total,
        index_bytes=len(content),
        index_check=zlib.crc32(content),
        wide=is_wide(entries.records, columns),
        times=kept_times(entries.records, columns),
        live_users=len(index),
        live_bytes=total,
    )


def _checks(records: memoryview, row_at: Longs, row_len: Longs, texts: memoryview, index: Array) -> list[int]:
    check = zlib.crc32
    begin, end = row_at.tolist(), (row_at + row_len).tolist()
    low, high = index["text"].tolist(), (index["text"] + index["text_len"]).tolist()
    return [check(texts[c:d], check(records[a:b])) for a, b, c, d in zip(begin, end, low, high, strict=True)]


def _write_file(uri: str, parts: Sequence[Any]) -> None:
    if not store.is_local(uri):
        store.write_bytes(uri, b"".join(parts))
        return
    path = store.local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)

    def into(stream: IO[bytes]) -> None:
        for part in parts:
            stream.write(part)

    write_whole(path, into)


class Reader:
    """An open generation; its index is read and checked once, its entries as they are asked for.

    Args:
        folder: URI of the bucket's folder.
        generation: What the manifest says of it.
        columns: What is kept.
    """

    def __init__(self, folder: str, generation: Generation, columns: HistoryColumns) -> None:
        self.generation = generation
        self._columns = columns
        self._uri = store.join(folder, f"{generation.name}.data")
        self._index_uri = store.join(folder, f"{generation.name}.index")
        self._record = record_type(columns, generation.times, wide=generation.wide)
        self.bytes_read = 0

    @cached_property
    def _index(self) -> tuple[Array, Array]:
        """The keys' high parts, ascending, and the places."""
        try:
            content = store.read_bytes(self._index_uri)
        except FileNotFoundError as error:
            raise FormatError(f"{self._index_uri} is missing", where=self._index_uri) from error
        self.bytes_read += len(content)
        users = self.generation.users
        if len(content) != self.generation.index_bytes or zlib.crc32(content) != self.generation.index_check:
            raise FormatError(f"{self._index_uri} differs from its manifest", where=self._index_uri)
        high = np.frombuffer(content, dtype=np.uint64, count=users)
        return high, np.frombuffer(content, dtype=_PLACE, offset=high.nbytes, count=users)

    @property
    def keys(self) -> Array:
        """All keys, in the index's order."""
        high, places = self._index
        keys = np.empty(len(high), dtype=KEY)
        keys["high"], keys["low"] = high, places["low"]
        return keys

    def find(self, keys: Array) -> Longs:
        """Return each key's place in the index, -1 where there is none."""
        high, places = self._index
        at = np.searchsorted(high, keys["high"])
        found = np.full(len(keys), -1, dtype=np.int64)
        left = np.arange(len(keys))
        while len(left):  # a second turn only where two users share the high part
            left = left[at[left] < len(high)]
            left = left[high[at[left]] == keys["high"][left]]
            same = places["low"][at[left]] == keys["low"][left]
            found[left[same]] = at[left[same]]
            left = left[~same]
            at[left] += 1
        return found

    def find_other(self, keys: Array) -> Longs:
        """Return the places of all entries but those of some keys."""
        others = np.ones(self.generation.users, dtype=np.bool_)
        found = self.find(keys)
        others[found[found >= 0]] = False
        return np.flatnonzero(others)

    def bytes_of(self, places: Longs) -> int:
        """Return the data bytes of entries."""
        chosen = self._index[1][places]
        return int(chosen["rows"].sum(dtype=np.int64)) * self._record.itemsize + int(
            chosen["text_len"].sum(dtype=np.int64)
        )

    def read(self, places: Longs) -> Entries:
        """Read entries by their places in the index.

        Raises:
            FormatError: The data file is missing, or not what was written.
        """
        keys, chosen = self.keys[places], self._index[1][places]
        size, text_at = self._record.itemsize, self.generation.text_at
        begin, length = chosen["row"].astype(np.int64) * size, chosen["rows"].astype(np.int64) * size
        text, text_len = chosen["text"].astype(np.int64) + text_at, chosen["text_len"].astype(np.int64)
        offsets = np.concatenate([begin, text])
        parts = self._ranges(offsets, offsets + np.concatenate([length, text_len]))
        records, texts = parts[: len(chosen)], parts[len(chosen) :]
        check = zlib.crc32
        found = [check(two, check(one)) for one, two in zip(records, texts, strict=True)]
        if found != chosen["check"].tolist():
            raise FormatError(f"{self._uri} is damaged", where=self._uri)
        return Entries(
            keys=keys,
            rows=chosen["rows"].astype(np.int64),
            floors=chosen["floor"].astype(np.int64),
            records=np.frombuffer(b"".join(records), dtype=self._record),
            texts=b"".join(texts),
            text_lens=text_len,
        )

    def _ranges(self, begin: Longs, end: Longs) -> Sequence[Any]:
        if store.is_local(self._uri):
            whole = self._mapped
            self.bytes_read += int((end - begin).sum())
            return [whole[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        runs, run = _runs(begin, end)
        try:
            parts = store.read_ranges(self._uri, [(a, b - a) for a, b in runs])
        except FileNotFoundError as error:
            raise FormatError(f"{self._uri} is missing", where=self._uri) from error
        self.bytes_read += sum(len(part) for part in parts)
        views = [memoryview(part) for part in parts]
        places = zip(run.tolist(), begin.tolist(), end.tolist(), strict=True)
        return [views[n][a - runs[n][0] : b - runs[n][0]] for n, a, b in places]

    @cached_property
    def _mapped(self) -> memoryview:
        try:
            with store.local_path(self._uri).open("rb") as stream:
                size = stream.seek(0, 2)
                if size != self.generation.data_bytes:
                    raise FormatError(f"{self._uri} differs from its manifest", where=self._uri)
                if not size:
                    return memoryview(b"")
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise FormatError(f"{self._uri} is missing", where=self._uri) from error
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_RANDOM)
        return memoryview(mapped)


def _runs(begin: Longs, end: Longs) -> tuple[list[tuple[int, int]], Longs]:
    """Join ranges that lie near each other: the requests to make, and the one that each range is part of."""
    order = np.argsort(begin, kind="stable")
    reached = np.maximum.accumulate(end[order])
    apart = np.append(True, begin[order][1:] > reached[:-1] + _NEAR)[: len(order)]
    first = np.flatnonzero(apart)
    last = np.append(first[1:], len(order)) - 1
    run = np.empty(len(order), dtype=np.int64)
    run[order] = np.cumsum(apart) - 1
    return list(zip(begin[order][first].tolist(), reached[last[: len(first)]].tolist(), strict=True)), run
