"""Packs as batches of tensors: memory-mapped, zero copies, no Python per token.

In: a pack directory (gr_core.data.packfile). Out: one `Batch` per record batch, whose tensors are views of the file.
The mapping is private (copy on write): nothing that a reader does reaches the file. `PackReader.ahead` yields the same
batches while a thread brings the pages of the next ones into memory.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from gr_core.data.prefetch import Prefetched
from gr_core.errors import FormatError
from gr_core.formats import check_format
from gr_core.hashing import file_sha256, fingerprint
from gr_core.schema import PACK_COLUMNS, PACK_FORMAT, pack_schema

# Handed over at once, growing from the one to the other: at 4 MiB the threads' fight for the interpreter's lock costs a
# quarter of the speed, at 16 MiB next to nothing.
_FIRST_GROUP_BYTES, _GROUP_BYTES = 2**20, 16 * 2**20
_AHEAD_BYTES = 32 * 2**20  # asked of the disk before it is needed, half of it at a time
_REQUIRED = (
    "tokens",
    "role",
    "num_supervised",
    "segment_starts",
    "batch_segments",
    "batch_weights",
    "vocabulary",
    "bound",
    "sha256",
)
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One batch of a pack. T tokens, S segments; tensors are views of the mapped file."""

    number: int
    """Place of the batch in the pack."""
    rows: dict[str, Tensor]
    """Table rows by feature, [T] int32."""
    actions: Tensor
    """Action bits known when the token became history, [T] int32; 0 on targets."""
    known: Tensor
    """Which bits of `actions` are known, [T] int32."""
    labels: Tensor
    """Due label bits, [T] int32."""
    label_known: Tensor
    """Which bits of `labels` are due, [T] int32."""
    time: Tensor
    """visible_at of history, shown_at of targets, [T] int64, microseconds UTC."""
    position: Tensor
    """Place in the segment; of a target: the count of history it sees from the segment's start, [T] int32."""
    lo: Tensor
    """First key of the batch that the token attends to, [T] int32."""
    hi: Tensor
    """One past the last key, [T] int32."""
    supervise: Tensor
    """On targets schema.DUE or schema.REPLAYED, else 0, [T] uint8."""
    weight: Tensor
    """Event weight, [T] float32."""
    segment_starts: npt.NDArray[np.int64]
    """Token offsets of the segments within the batch, [S + 1]; the last is T."""
    weights: dict[str, float]
    """Sum of loss weights per normalisation: the loss denominator (examples 6)."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.time.numel()


class PackReader:
    """A memory-mapped pack.

    The index need not say more than examples 9 prints; what it leaves out is read off the rows: features are the columns
    that every pack does not have, the supervised actions those with a due label, and actions are named action_<bit>.

    Args:
        path: Directory of the pack.
        verify: Compare the files with the SHA-256 in the index first.

    Raises:
        FormatError: No finished pack, another format number, damaged files, or columns that the index does not name.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        index = read_index(path, verify=verify)
        self._map = _map_file(path / "pack.arrow")
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = int(self._bytes.ctypes.data)
        try:
            self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
        except pa.ArrowInvalid as error:
            raise FormatError(
                f"{path / 'pack.arrow'} is no Arrow file: {error}; pack again", where=str(path)
            ) from error
        self.index = _with_defaults(index, self._reader)
        expected = pack_schema(self.features)
        if _kinds(self._reader.schema) != _kinds(expected):
            raise FormatError(
                f"{path / 'pack.arrow'} has the columns {self._reader.schema.names}, its index says {expected.names}; "
                "pack again",
                where=str(path),
            )
        self._names = tuple(self._reader.schema.names)
        self._dtypes = [TORCH_TYPES[kind] for kind in self._reader.schema.types]
        self._starts = np.asarray(self.index["segment_starts"], dtype=np.int64)
        self._bounds = np.asarray(self.index["batch_segments"], dtype=np.int64)
        self._tokens = np.diff(self._starts[self._bounds])
        # Arrow's writers put columns side by side, each on a multiple of 8 bytes. Trusted only where the last one agrees.
        sizes = np.asarray([dtype.itemsize for dtype in self._dtypes])
        ends = np.cumsum((self._tokens[:, None] * sizes + 7) // 8 * 8, axis=1)
        self._layout = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1).tolist()
        if self._reader.num_record_batches != len(self._bounds) - 1:
            raise FormatError(
                f"{path} has {self._reader.num_record_batches} batches, its index says {len(self._bounds) - 1}; pack again",
                where=str(path),
            )

    @property
    def features(self) -> list[str]:
        """Feature columns in table order."""
        return list(self.index["features"])

    @property
    def digest(self) -> str:
        """SHA-256 of the index's own `sha256` entries: equal exactly when the rows are equal."""
        return fingerprint(self.index["sha256"])

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order."""
        return (self.batch(i) for i in range(len(self)))

    def batch(self, number: int) -> Batch:
        """Return batch `number` as views of the file.

        Raises:
            FormatError: A column has nulls.
        """
        count, places = self._places(number)
        columns = {
            name: torch.frombuffer(self._map, dtype=dtype, count=count, offset=place)
            if count
            else torch.empty(0, dtype=dtype)
            for name, dtype, place in zip(self._names, self._dtypes, places, strict=True)
        }
        begin, end = int(self._bounds[number]), int(self._bounds[number + 1])
        return Batch(
            number=number,
            rows={name: columns[name] for name in self.features},
            **{name: columns[name] for name in PACK_COLUMNS},
            segment_starts=self._starts[begin : end + 1] - self._starts[begin],
            weights={mode: float(values[number]) for mode, values in self.index["batch_weights"].items()},
        )

    def targets(self) -> tuple[list[str], list[str]]:
        """Return (event_ids, users) of the supervised and replayed tokens in pack order, [N] each.

        Raises:
            FormatError: targets.arrow is missing or does not belong to the pack.
        """
        try:
            with pa.memory_map(str(self.path / "targets.arrow")) as source:
                table = pa.ipc.open_file(source).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise FormatError(
                f"{self.path / 'targets.arrow'} cannot be read: {error}; pack again", where=str(self.path)
            ) from error
        expected = self.index["num_supervised"] + self.index.get("num_replayed", 0)
        if table.num_rows != expected:
            raise FormatError(
                f"{self.path} has {table.num_rows} rows in targets.arrow for {expected} supervised tokens; pack again",
                where=str(self.path),
            )
        return table.column("event_id").to_pylist(), table.column("user_id").to_pylist()

    @contextmanager
    def ahead(self, numbers: Sequence[int] | None = None, *, depth: int = 2) -> Iterator[Iterator[Batch]]:
        """Yield an iterator of batches whose pages a background thread has touched already; still zero copies.

        Args:
            numbers: Batches to read, in this order; None: all.
            depth: Groups of batches, 16 MiB each, that may be ready and not yet taken.
        """
        with Prefetched(self.touched(range(len(self)) if numbers is None else numbers), depth=depth) as groups:
            yield (self.batch(number) for group in groups for number in group)

    def touched(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield batch numbers in groups, each when its pages are in memory; what follows in the file is on its way.

        Raises:
            OSError: The file is gone.
        """
        file = os.open(self.path / "pack.arrow", os.O_RDONLY)
        try:
            asked = 0
            for group in self._groups(numbers):
                begin, end = self._extent(group[0])[0], self._extent(group[-1])[1]
                if begin + _AHEAD_BYTES // 2 > asked:
                    _will_need(file, begin, _AHEAD_BYTES)
                    asked = begin + _AHEAD_BYTES
                # One byte a page is enough; 500 steps and more let numpy release the interpreter's lock.
                np.add.reduce(self._bytes[begin : end : max(64, min(mmap.PAGESIZE, (end - begin) // 1024))])
                yield group
        finally:
            os.close(file)

    def _groups(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Cut numbers into runs that follow each other in the file, of growing size."""
        row_bytes = sum(dtype.itemsize for dtype in self._dtypes)
        group: list[int] = []
        size, enough = 0, _FIRST_GROUP_BYTES
        for number in numbers:
            if group and (size >= enough or number != group[-1] + 1):
                yield group
                group, size, enough = [], 0, min(2 * enough, _GROUP_BYTES)
            group.append(number)
            size += int(self._tokens[number]) * row_bytes
        if group:
            yield group

    def _places(self, number: int) -> tuple[int, list[int]]:
        """Return a batch's rows, and where in the file each column's values begin."""
        record = self._reader.get_batch(number)
        first, last = record.column(0), record.column(record.num_columns - 1)
        if record.num_rows and first.null_count == 0:
            begin = self._offset(first)
            places = [begin + place for place in self._layout[number]]
            # A validity map before the last column would move it: where it stands as planned there are no nulls.
            if self._offset(last) == places[-1]:
                return record.num_rows, places
        arrays = record.columns
        nulls = [name for name, array in zip(self._names, arrays, strict=True) if array.null_count]
        if nulls:
            raise FormatError(f"{self.path} has nulls in {nulls}, batch {number}; pack again", where=str(self.path))
        return record.num_rows, [self._offset(array) if record.num_rows else 0 for array in arrays]

    def _offset(self, array: pa.Array) -> int:
        # An array of a file's record batch starts where its buffer does.
        return int(array.buffers()[1].address) - self._base

    def _extent(self, number: int) -> tuple[int, int]:
        """Return begin and end in the file of a batch's columns, which lie there one after the other."""
        record = self._reader.get_batch(number)
        if record.num_rows == 0:
            return 0, 0
        last = record.column(record.num_columns - 1)
        return self._offset(record.column(0)), self._offset(last) + last.nbytes


TORCH_TYPES = {pa.int32(): torch.int32, pa.int64(): torch.int64, pa.uint8(): torch.uint8, pa.float32(): torch.float32}


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _will_need(file: int, offset: int, length: int) -> None:
    """Ask the disk for a part of a file, without waiting."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)


def _kinds(schema: pa.Schema) -> dict[str, pa.DataType]:
    return dict(zip(schema.names, schema.types, strict=True))


def _with_defaults(index: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Return the index with what it leaves out."""
    ends = np.asarray(index["segment_starts"], np.int64)[np.asarray(index["batch_segments"], np.int64)]
    tokens = np.diff(ends).tolist()
    filled = {
        "features": [name for name in reader.schema.names if name not in PACK_COLUMNS],
        "layout": "packed",
        "grouping": "none",
        "batch_tokens": tokens,
        "token_budget": max(tokens, default=0),
        "seed": 0,
        **index,
    }
    if "supervised" not in filled:
        filled["supervised"] = _bits_used(reader, "label_known")
    if "actions" not in filled:
        highest = (_bits_used(reader, "known") | _bits_used(reader, "label_known")).bit_length()
        filled["actions"] = [f"action_{bit}" for bit in range(highest)]
    bound = filled["bound"]
    if bound is not None and "cutoff_us" not in bound:
        since = datetime.fromisoformat(bound["cutoff"]) - _EPOCH
        filled["bound"] = {**bound, "cutoff_us": since // timedelta(microseconds=1)}
    return filled


def _bits_used(reader: Any, column: str) -> int:
    """Return the OR of a mask column over the whole pack."""
    records = (reader.get_batch(number) for number in range(reader.num_record_batches))
    used = 0
    for record in records:
        used |= int(np.bitwise_or.reduce(record.column(column).to_numpy(zero_copy_only=False), initial=0))
    return used


def read_index(path: Path, *, verify: bool) -> dict[str, Any]:
    """Read a pack's index.json as it stands.

    Args:
        path: Directory of the pack.
        verify: Compare the files with the SHA-256 in the index.

    Raises:
        FormatError: No finished pack, another format number, a key is missing, or damaged files.
    """
    try:
        index: dict[str, Any] = json.loads((path / "index.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(
            f"{path} has no index.json, so it is no finished pack; pack again", where=str(path)
        ) from error
    except ValueError as error:
        raise FormatError(f"{path / 'index.json'} is no JSON: {error}; pack again", where=str(path)) from error
    check_format("pack", str(path), index.get("format"), PACK_FORMAT, "pack again")
    missing = [name for name in _REQUIRED if name not in index]
    if missing:
        raise FormatError(f"{path / 'index.json'} lacks {missing}; pack again", where=str(path))
    for name, expected in index["sha256"].items():
        file = path / name
        if not file.exists() or (verify and file_sha256(file) != expected):
            raise FormatError(f"{file} is missing or not what index.json says (sha256); pack again", where=str(file))
    return index
