"""Sequences of a bucket as they lie in files: rows of history and targets, and segments as ranges of them.

A token's row stands once, however many segments and roles show it: a segment is one range of history rows followed by
one range of target rows. Features are codes into the bucket's dictionaries, so that neither text nor a vocabulary is
needed before the rows become a batch. Needs numpy and pyarrow alone.

One row is WORDS + F int32 words (F features; filled up to an even number), so that a gather moves whole rows: time (us,
int64, two words), actions | labels, known | label_known, lo, hi, then a code a feature. lo and hi are rows of the
history; in a segment whose history begins at row b a token sees the keys [max(lo - b, 0), hi - b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.schema import DUE, PAD_ROW, REPLAYED, UNKNOWN_ROW

ROWS_FILE = "rows.arrow"
SEGMENTS_FILE = "segments.arrow"
EVENTS_FILE = "events.arrow"
WEIGHTS_FILE = "weights.arrow"

BITS, KNOWN, LO, HI, WORDS = 2, 3, 4, 5, 6
PAD_CODE, UNKNOWN_CODE, FIRST_CODE = PAD_ROW, UNKNOWN_ROW, 2
"""Codes of a feature: none here (a context feature of history), null, and the first id of the dictionary."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """The sequences of one bucket. R rows, N of them history, M targets, S segments, U users."""

    features: tuple[str, ...]
    """Names of the code words, in their order."""
    rows: Ints
    """[R, width(F)], C-contiguous: N history rows in (user, time, event_id) order, then the targets."""
    num_history: int
    """N."""
    user: Ints
    """User of each segment, a place in `users`, [S]."""
    roles: npt.NDArray[np.uint8]
    """Bit mask of the roles that a segment belongs to, [S]."""
    begin: Longs
    """First history row of each segment, [S]."""
    history: Ints
    """Its history rows, [S]."""
    target: Longs
    """Its first target row, counted from row 0, [S]."""
    targets: Ints
    """Its target rows, [S]."""
    users: Any
    """Distinct users in text order, pyarrow large_string, [U]."""
    event_ids: Any
    """Event of each target row, pyarrow large_string, [R - N]."""
    weight: npt.NDArray[np.float32] | None = None
    """Event weight of each target row, [R - N]; None: 1, and there is no file."""


SEGMENT_TYPES: dict[str, type[np.generic]] = {
    "user": np.int32,
    "roles": np.uint8,
    "begin": np.int64,
    "history": np.int32,
    "target": np.int64,
    "targets": np.int32,
}
"""Numbers that a segment has; segments.arrow holds `user` as text, a dictionary column user_id."""


def width(num_features: int) -> int:
    """Return the words of a row: even, so that its first two are an aligned int64."""
    return WORDS + num_features + num_features % 2


def times(rows: Ints) -> Longs:
    """Return the time column of rows as a view, [R] int64."""
    column: Longs = rows.view(np.int64)[:, 0]
    return column


def write(ragged: Ragged, folder: Path) -> None:
    """Write a bucket's sequences as uncompressed Arrow IPC files; equal values give equal bytes."""
    wide = ragged.rows.shape[1]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(ragged.rows.reshape(-1)), wide)
    facts = {"features": "\n".join(ragged.features), "history": str(ragged.num_history)}
    write_columns(folder / ROWS_FILE, {"row": rows}, facts)
    numbers = {name: pa.array(getattr(ragged, name)) for name in SEGMENT_TYPES if name != "user"}
    user = pa.DictionaryArray.from_arrays(pa.array(ragged.user), ragged.users)
    write_columns(folder / SEGMENTS_FILE, {"user_id": user, **numbers})
    write_columns(folder / EVENTS_FILE, {"event_id": ragged.event_ids})
    if ragged.weight is not None:
        write_columns(folder / WEIGHTS_FILE, {"weight": pa.array(ragged.weight)})


def read(folder: Path) -> Ragged:
    """Map a bucket's sequences; rows and texts stay in the files until they are used.

    Raises:
        OSError: A file is missing.
        ValueError: A file is damaged (pyarrow.ArrowInvalid is one).
    """
    rows, facts = read_columns(folder / ROWS_FILE)
    segments, _ = read_columns(folder / SEGMENTS_FILE)
    user = segments.pop("user_id")
    names = facts["features"].split("\n") if facts["features"] else []
    weighted = (folder / WEIGHTS_FILE).exists()
    flat = rows["row"].values.to_numpy()
    return Ragged(
        features=tuple(names),
        rows=flat.reshape(-1, width(len(names))),
        num_history=int(facts["history"]),
        users=user.dictionary,
        user=user.indices.to_numpy(),
        event_ids=read_columns(folder / EVENTS_FILE)[0]["event_id"],
        weight=read_columns(folder / WEIGHTS_FILE)[0]["weight"].to_numpy() if weighted else None,
        **{name: values.to_numpy() for name, values in segments.items()},
    )


def write_columns(path: Path, columns: dict[str, Any], facts: dict[str, str] | None = None) -> None:
    """Write arrays of one length as one record batch of an uncompressed Arrow IPC file, with schema metadata."""
    schema = pa.schema([pa.field(name, values.type) for name, values in columns.items()], metadata=facts)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def read_columns(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Map a file of `write_columns`: its arrays by name, and its metadata."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        batch = reader.get_batch(0)
    facts = {key.decode(): value.decode() for key, value in (batch.schema.metadata or {}).items()}
    return dict(zip(batch.schema.names, batch.columns, strict=True)), facts


def ranges(begin: Longs, count: npt.NDArray[Any]) -> Longs:
    """Return the numbers begin[i] .. begin[i] + count[i] - 1 of all i, end to end."""
    ends: Longs = np.cumsum(count, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    found: Longs = np.repeat(begin - (ends - count), count)
    found += np.arange(total)
    return found


class RaggedSource:
    """Segments of one role over several buckets, as `packfile.write_pack` takes them.

    Args:
        parts: The buckets, at least one; all with the same features.
        tables: For each bucket and feature the embedding row of every code, [FIRST_CODE + D] int32.
        role: Bit of the role; segments without it are left out, but for
        replay: the bit of those whose targets are trained on again: they come with supervise = REPLAYED.
    """

    def __init__(self, parts: Sequence[Ragged], tables: Sequence[dict[str, Ints]], role: int, replay: int = 0) -> None:
        self._parts = list(parts)
        self._features = self._parts[0].features
        chosen = [np.flatnonzero(part.roles & (role | replay)) for part in self._parts]
        counts = [len(places) for places in chosen]

        def column(name: str) -> Longs:
            each = (getattr(part, name)[at] for part, at in zip(self._parts, chosen, strict=True))
            return np.concatenate(list(each)).astype(np.int64, copy=False)

        self._part = np.repeat(np.arange(len(counts)), counts)
        self._begin, self._target = column("begin"), column("target")
        self._flag = np.where(column("roles") & replay, REPLAYED, DUE).astype(np.uint8)
        self._pieces = np.stack([column("history"), column("targets")], axis=1)
        first = np.cumsum([0, *(len(part.users) for part in self._parts)])
        self._user = column("user") + first[self._part]
        self._users = pa.concat_arrays([part.users for part in self._parts])
        # All tables end to end, so that one look-up serves every feature and tokens of all buckets.
        each = [table[name] for table in tables for name in self._features]
        self._table = np.concatenate([np.zeros(0, np.int32), *each])
        ends = np.cumsum([0, *(len(table) for table in each)])[:-1].astype(np.int32)
        self._offset = ends.reshape(len(self._parts), len(self._features))

    @property
    def lengths(self) -> Longs:
        """Tokens of each segment, [S]."""
        return np.asarray(self._pieces.sum(axis=1))

    @property
    def users(self) -> Any:
        """User of each segment, a pyarrow array of text, [S]."""
        return self._users.take(pa.array(self._user))

    def take(self, segments: Longs) -> tuple[dict[str, npt.NDArray[Any]], Any]:
        """Return the tokens of segments, end to end, and the event ids of their targets.

        Args:
            segments: Segment numbers, in any order.

        Returns:
            The pack's columns with segment-relative lo and hi; event ids as a pyarrow array of text.
        """
        # Bucket by bucket, so that each gather reads one file; then into the order asked for.
        order = np.argsort(self._part[segments], kind="stable")
        rows, events = self._gather(segments[order])
        weights = self._weights(segments)
        if not np.array_equal(order, np.arange(len(order))):
            back = np.argsort(order)
            lengths = self._pieces[segments[order]].sum(axis=1)
            rows = rows.take(ranges((np.cumsum(lengths) - lengths)[back], lengths[back]), axis=0)
            counts = self._pieces[segments[order], 1]
            events = events.take(pa.array(ranges((np.cumsum(counts) - counts)[back], counts[back])))
        return self._columns(rows, segments) | {"weight": weights}, events

    def _gather(self, segments: Longs) -> tuple[Ints, Any]:
        """Return rows, their codes counted from the start of all tables, and event ids; bucket by bucket."""
        pieces = self._pieces[segments]
        begins = np.stack([self._begin[segments], self._target[segments]], axis=1)
        place = ranges(begins.reshape(-1), pieces.reshape(-1))
        numbers, firsts = np.unique(self._part[segments], return_index=True)
        ends = np.append(0, np.cumsum(pieces.sum(axis=1)))
        rows = np.empty((len(place), width(len(self._features))), dtype=np.int32)
        events = [pa.array([], pa.large_string())]
        for number, first, last in zip(numbers, firsts, np.append(firsts, len(segments))[1:], strict=True):
            part, own = self._parts[number], slice(ends[first], ends[last])
            # mode="clip" lets take write into `out` unbuffered; all places are valid.
            np.take(part.rows, place[own], axis=0, out=rows[own], mode="clip")
            for word, offset in enumerate(self._offset[number], WORDS):
                rows[own, word] += offset
            targets = ranges(begins[first:last, 1] - part.num_history, pieces[first:last, 1])
            events.append(part.event_ids.take(pa.array(targets)))
        return rows, pa.concat_arrays(events)

    def _weights(self, segments: Longs) -> npt.NDArray[np.float32]:
        """Return the event weight of each token of segments, 1 on history."""
        pieces = self._pieces[segments]
        weights = np.ones(int(pieces.sum()), dtype=np.float32)
        starts = np.cumsum(pieces.sum(axis=1)) - pieces[:, 1]
        for number in np.unique(self._part[segments]):
            part = self._parts[number]
            if part.weight is not None:
                own = self._part[segments] == number
                counts = pieces[own, 1]
                source = ranges(self._target[segments[own]] - part.num_history, counts)
                weights[ranges(starts[own], counts)] = part.weight[source]
        return weights

    def _columns(self, rows: Ints, segments: Longs) -> dict[str, npt.NDArray[Any]]:
        pieces = self._pieces[segments]
        begin = np.repeat(self._begin[segments].astype(np.int32), pieces.sum(axis=1))
        is_target = np.repeat(np.tile(np.array([0, 1], dtype=np.uint8), len(segments)), pieces.reshape(-1))
        # Planes of their own: arithmetic on them runs several tokens at a time.
        bits, known, lo, hi = np.ascontiguousarray(rows[:, BITS : HI + 1].T)
        hi -= begin
        labels, label_known = bits * is_target, known * is_target
        code = rows[:, WORDS : WORDS + len(self._features)].T.astype(np.int64, order="C")
        return {
            **dict(zip(self._features, self._table.take(code), strict=True)),
            "actions": bits - labels,
            "known": known - label_known,
            "labels": labels,
            "label_known": label_known,
            "time": times(rows).copy(),
            "position": hi,
            "lo": np.maximum(lo - begin, 0),
            "hi": hi,
            "supervise": is_target * np.repeat(self._flag[segments], pieces.sum(axis=1)),
        }
