"""Entries of the history store: users' capped histories as records of fixed width and texts, each user's together.

In: rows of the event table. Out: the bytes that a generation keeps of them, and back. A few operations a column; Python
runs once a user, for his key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from gr_core.refs import NEVER

Array = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]

KEY = np.dtype([("high", "<u8"), ("low", "<u4")])
"""96 bits of BLAKE2b: for 10**9 users of a bucket two alike have a chance of 10**-11, so no id is kept to tell them."""
INSTANT = pl.Datetime("us", "UTC")
_TIMES = ("shown_at", "visible_at")
_MASKS = ("actions", "known")


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryColumns:
    """What an entry keeps of an event: shown_at, visible_at, actions and known, and these."""

    texts: tuple[str, ...]
    """event_id first, then item_id and side features."""
    times: tuple[str, ...]
    """The time of each action, in bit order."""

    @property
    def names(self) -> list[str]:
        """All columns of a row, user_id first."""
        return ["user_id", *self.texts, *_TIMES, *_MASKS, *self.times]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """Entries as they are stored, of one or more users: records and texts of user i at the i-th place."""

    keys: Array
    """KEY, [U]."""
    rows: Longs
    """Rows of each user, [U]."""
    floors: Longs
    """[U]; see history_rows."""
    records: Array
    """All rows, users end to end."""
    texts: bytes | memoryview
    """Texts of all rows, likewise."""
    text_lens: Longs
    """Bytes of each user's texts, [U]."""


def keys_of(users: Sequence[str], *, deep: bool = False) -> Array:
    """Return the keys of the users' head or deep entries, KEY, [U]."""
    digest, person = hashlib.blake2b, b"history-deep" if deep else b"history"
    return np.frombuffer(
        b"".join([digest(user.encode(), digest_size=12, person=person).digest() for user in users]), dtype=KEY
    )


def encode(rows: pl.DataFrame, columns: HistoryColumns, floors: Longs, *, deep: bool = False) -> Entries:
    """Bring rows into their stored form.

    Args:
        rows: The columns' names; rows of a user stand together.
        columns: What is kept.
        floors: One a user, in the users' order.
        deep: They are deep entries.

    Returns:
        The entries, in the users' order.
    """
    first = rows.select(pl.col("user_id").ne_missing(pl.col("user_id").shift())).to_series()
    starts = np.append(np.flatnonzero(first.to_numpy()), rows.height) if rows.height else np.zeros(1, np.int64)
    texts = rows.select(columns.texts)
    # one more than the length, and 0 for null
    lens = texts.select((pl.all().str.len_bytes() + 1).fill_null(0))
    longest = max(lens.max().row(0), default=0) if rows.height else 0
    wide = longest > np.iinfo(np.uint16).max
    micros = {name: rows[name].dt.timestamp("us") for name in (*_TIMES, *columns.times)}
    times = tuple(name for name in columns.times if micros[name].null_count() < rows.height)
    records = np.empty(rows.height, dtype=record_type(columns, times, wide=wide))
    for name in (*_TIMES, *times):
        records[name] = micros[name].fill_null(NEVER).to_numpy()
    for name in _MASKS:
        records[name] = rows[name].to_numpy()
    for name in columns.texts:
        records[f"len_{name}"] = lens[name].to_numpy()
    joined = texts.select(pl.concat_str(pl.all().fill_null(""))).to_series().rename("")
    offsets, values = _flat(joined)
    return Entries(
        keys=keys_of(rows.filter(first)["user_id"].to_list(), deep=deep),
        rows=np.diff(starts),
        floors=floors,
        records=records,
        texts=values,
        text_lens=np.diff(offsets[starts]),
    )


def decode(entries: Entries, users: pl.Series, columns: HistoryColumns) -> pl.DataFrame:
    """Return the rows of entries.

    Args:
        entries: As read.
        users: user_id of each entry.
        columns: What is kept.

    Returns:
        The columns' names, in the order of the entries.
    """
    records, names = entries.records, entries.records.dtype.names or ()
    lens = {name: records[f"len_{name}"].astype(np.int64) for name in columns.texts}
    sizes = {name: np.maximum(value - 1, 0) for name, value in lens.items()}
    ends = np.cumsum(sum(sizes.values()))
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(entries.texts)]
    blob = pl.Series(values=pa.Array.from_buffers(pa.large_binary(), len(records), buffers))
    frame = {"user_id": users.gather(np.repeat(np.arange(len(users)), entries.rows))}
    at = np.zeros(len(records), dtype=np.int64)
    for name in columns.texts:
        part = pl.select(pl.lit(blob).bin.slice(pl.lit(pl.Series(at)), pl.lit(pl.Series(sizes[name])))).to_series()
        there = pl.Series(lens[name] > 0)
        frame[name] = part.cast(pl.String).zip_with(there, pl.Series([None], dtype=pl.String))
        at = at + sizes[name]
    for name in (*_TIMES, *columns.times):
        micros = pl.Series(np.ascontiguousarray(records[name]) if name in names else np.full(len(records), NEVER))
        missing = pl.Series([None], dtype=pl.Int64)
        frame[name] = micros.zip_with(micros != NEVER, missing).cast(INSTANT)
    for name in _MASKS:
        frame[name] = pl.Series(np.ascontiguousarray(records[name]))
    return pl.DataFrame(frame).select(columns.names)


def concat(parts: Sequence[Entries], columns: HistoryColumns) -> Entries:
    """Join entries of several generations; records take the widest form."""
    there = {name for part in parts for name in kept_times(part.records, columns)}
    times = tuple(name for name in columns.times if name in there)
    wide = any(is_wide(part.records, columns) for part in parts)
    kind = record_type(columns, times, wide=wide)
    return Entries(
        keys=np.concatenate([np.empty(0, KEY), *(part.keys for part in parts)]),
        rows=np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)]),
        floors=np.concatenate([np.empty(0, np.int64), *(part.floors for part in parts)]),
        records=np.concatenate([np.empty(0, kind), *(_widened(part.records, kind) for part in parts)]),
        texts=b"".join([part.texts for part in parts]),
        text_lens=np.concatenate([np.empty(0, np.int64), *(part.text_lens for part in parts)]),
    )


def record_type(columns: HistoryColumns, times: tuple[str, ...], *, wide: bool) -> np.dtype[Any]:
    """Return the form of a record with these action times; wide: text lengths are uint32 instead of uint16."""
    length = "<u4" if wide else "<u2"
    kept = [name for name in columns.times if name in times]
    return np.dtype(
        [(name, "<i8") for name in (*_TIMES, *kept)]
        + [(name, "<i4") for name in _MASKS]
        + [(f"len_{name}", length) for name in columns.texts]
    )


def is_wide(records: Array, columns: HistoryColumns) -> bool:
    """Tell whether the text lengths of records are uint32."""
    return bool(records.dtype[f"len_{columns.texts[0]}"].itemsize == np.dtype("<u4").itemsize)


def kept_times(records: Array, columns: HistoryColumns) -> tuple[str, ...]:
    """Return the action times that records have; the others are null in all rows."""
    return tuple(name for name in columns.times if name in (records.dtype.names or ()))


def _widened(records: Array, kind: np.dtype[Any]) -> Array:
    if records.dtype == kind:
        return records
    wider = np.empty(len(records), dtype=kind)
    for name in kind.names or ():
        wider[name] = records[name] if name in (records.dtype.names or ()) else NEVER
    return wider


def _flat(texts: pl.Series) -> tuple[Longs, memoryview]:
    """Return offsets [N + 1] and bytes of texts without nulls."""
    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    if not len(array):
        return np.zeros(1, np.int64), memoryview(b"")
    _, offsets, values = array.buffers()
    at = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return at - at[0], memoryview(values or b"")[int(at[0]) : int(at[-1])]
