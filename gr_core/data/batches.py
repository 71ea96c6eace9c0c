"""Packs as batches of tensors: memory-mapped, zero copies, no Python per token.

In: a pack directory (gr_core.data.packfile). Out: one `Batch` per record batch, whose tensors are views of the file.
The mapping is private (copy on write): nothing that a reader does reaches the file.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from gr_core.errors import FormatError
from gr_core.hashing import file_sha256, fingerprint
from gr_core.schema import PACK_COLUMNS, PACK_FORMAT, pack_schema

_EMPTY = bytearray(8)  # where a column of no rows lies
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
    """1 on targets, [T] uint8."""
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
        self._starts = np.asarray(self.index["segment_starts"], dtype=np.int64)
        self._bounds = np.asarray(self.index["batch_segments"], dtype=np.int64)
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
        record = self._reader.get_batch(number)
        nulls = [name for name in record.schema.names if record.column(name).null_count]
        if nulls:
            raise FormatError(f"{self.path} has nulls in {nulls}, batch {number}; pack again", where=str(self.path))
        columns = {name: self._view(record.column(name), record.num_rows) for name in record.schema.names}
        begin, end = int(self._bounds[number]), int(self._bounds[number + 1])
        return Batch(
            number=number,
            rows={name: columns[name] for name in self.features},
            **{name: columns[name] for name in PACK_COLUMNS},
            segment_starts=self._starts[begin : end + 1] - self._starts[begin],
            weights={mode: float(values[number]) for mode, values in self.index["batch_weights"].items()},
        )

    def targets(self) -> tuple[list[str], list[str]]:
        """Return (event_ids, users) of the supervised tokens in pack order, [N] each.

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
        if table.num_rows != self.index["num_supervised"]:
            raise FormatError(
                f"{self.path} has {table.num_rows} rows in targets.arrow for {self.index['num_supervised']} supervised "
                "tokens; pack again",
                where=str(self.path),
            )
        return table.column("event_id").to_pylist(), table.column("user_id").to_pylist()

    def _view(self, array: pa.Array, count: int) -> Tensor:
        dtype = np.dtype(array.type.to_pandas_dtype())
        if count == 0:
            return torch.frombuffer(_EMPTY, dtype=_TORCH[dtype.name], count=1)[:0]
        offset = array.buffers()[1].address - self._base + array.offset * dtype.itemsize
        return torch.frombuffer(self._map, dtype=_TORCH[dtype.name], count=count, offset=offset)


_TORCH = {"int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "float32": torch.float32}


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


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
    if index.get("format") != PACK_FORMAT:
        raise FormatError(
            f"{path} has pack format {index.get('format')!r}, this release reads {PACK_FORMAT}; pack again",
            where=str(path),
        )
    missing = [name for name in _REQUIRED if name not in index]
    if missing:
        raise FormatError(f"{path / 'index.json'} lacks {missing}; pack again", where=str(path))
    for name, expected in index["sha256"].items():
        file = path / name
        if not file.exists() or (verify and file_sha256(file) != expected):
            raise FormatError(f"{file} is missing or not what index.json says (sha256); pack again", where=str(file))
    return index
