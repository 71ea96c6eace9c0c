"""`pack.tokens = interleaved`: item, action, item, action, from the same entries and targets as `targets`.

An entry of a user's history (an event at visible_at, or a late action) becomes an item token and an action token, a late
action an action token alone; a target becomes the item token of its own event, supervised. Tokens stand in the entries'
(visible_at, event_id) order. What a target sees is the same history as in `targets`, written with more tokens (example 3).
Needs numpy and pyarrow alone.

Dims: `B` rows of some segments, each one's entries, then its targets; `T` tokens; `S` segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.data.ragged import Ints, Longs, Ragged, RaggedSource, ranges, read_columns, write_columns
from gr_core.schema import PAD_ROW

ENTRIES_FILE = "entries.arrow"
OWN_FILE = "own.arrow"
ITEM, ACTION, TARGET = 0, 1, 2
ENTRY_TOKENS = 2
"""Most tokens of a history entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """What interleaving needs to know of segments beside their rows; all places count from the segment's first entry."""

    pieces: Longs
    """Entries and targets of each segment, [S, 2]."""
    is_target: npt.NDArray[np.bool_]
    """[B]."""
    late: npt.NDArray[np.bool_]
    """A late action, which has no item token, [B]; false on targets."""
    place: Longs
    """Of an entry its place, of a target that of its own event's entry, which may lie past the segment's end, [B]."""
    first: Longs
    """First entry that an item token sees, [B]."""
    seen: Longs
    """End of the entries that it sees: those visible before its shown_at, [B]."""
    since: Longs
    """First entry that an action token sees, [B]; it sees all from there up to itself. Unused on targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaved:
    """Where each token comes from and what it sees; lo, hi and position count from the segment's first token."""

    source: Longs
    """Row, [T]."""
    kind: npt.NDArray[np.uint8]
    """ITEM, ACTION or TARGET, [T]."""
    lengths: Longs
    """Tokens of each segment, [S]."""
    position: Ints
    """Place in the segment, [T]."""
    lo: Ints
    """[T]."""
    hi: Ints
    """[T]."""


def interleave(entries: Entries) -> Interleaved:
    """Lay out the tokens of segments: one sort, no Python per token.

    Args:
        entries: The segments.

    Returns:
        The tokens, segment by segment. The item token of an entry whose event is a target of its segment is that target.
    """
    counts = entries.pieces.sum(axis=1)
    segment = np.repeat(np.arange(len(counts)), counts)
    span = ENTRY_TOKENS * (int(entries.place.max(initial=0)) + int(entries.seen.max(initial=0)) + 2)
    key = segment * span + ENTRY_TOKENS * entries.place  # of the row's item token; its action token's is one more
    rows = np.arange(len(key))
    targets, old = rows[entries.is_target], rows[~entries.is_target]
    items = old[~entries.late[old] & ~np.isin(key[old], key[targets])]
    keys = np.concatenate([key[items], key[old] + 1, key[targets]])
    order = np.argsort(keys)
    source = np.concatenate([items, old, targets])[order]
    kind = np.repeat(np.array([ITEM, ACTION, TARGET], np.uint8), [len(items), len(old), len(targets)])[order]
    keys = keys[order]
    owner = segment[source]
    starts = np.searchsorted(owner, np.arange(len(counts)))
    position = np.arange(len(keys)) - starts[owner]
    lengths = np.bincount(owner, minlength=len(counts))

    def token_of(place: Longs) -> Longs:
        """Return the first token of an entry or after it, counted from the segment's first."""
        found: Longs = np.searchsorted(keys, owner * span + ENTRY_TOKENS * place) - starts[owner]
        return found

    is_action = kind == ACTION
    end = np.minimum(entries.seen[source], entries.pieces[owner, 0])
    hi = np.where(is_action, position, token_of(end))
    lo = np.minimum(token_of(np.where(is_action, entries.since[source], entries.first[source])), hi)
    return Interleaved(
        source=source,
        kind=kind,
        lengths=lengths,
        position=position.astype(np.int32),
        lo=lo.astype(np.int32),
        hi=hi.astype(np.int32),
    )


def columns_of(
    made: Interleaved, base: dict[str, npt.NDArray[Any]], shown: Longs, features: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    """Return the pack's columns of interleaved tokens, lo and hi counted from the segment.

    Args:
        made: The tokens.
        base: The pack's columns of the rows, as `targets` has them, [B].
        shown: shown_at of each entry's event, us, [B]; not read of targets, whose time it is.
        features: Feature columns.
    """
    is_action, is_target = made.kind == ACTION, made.kind == TARGET
    found = {name: np.where(is_action, PAD_ROW, base[name][made.source]).astype(np.int32) for name in features}
    for name, kept in (("actions", is_action), ("known", is_action), ("labels", is_target), ("label_known", is_target)):
        found[name] = np.where(kept, base[name][made.source], 0).astype(np.int32)
    found["supervise"] = np.where(is_target, base["supervise"][made.source], 0).astype(np.uint8)
    found["weight"] = np.where(is_target, base["weight"][made.source], 1).astype(np.float32)
    found["time"] = np.where(made.kind == ITEM, shown[made.source], base["time"][made.source])
    return found | {"position": made.position, "lo": made.lo, "hi": made.hi}


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What a bucket's rows say beside `ragged`: N history rows, M targets; entries by their history row."""

    shown: Longs
    """shown_at of each row's event, us, [N]."""
    late: npt.NDArray[np.uint8]
    """1: a late action, [N]."""
    first: Longs
    """First row that the row's item token sees, under a time window; else its user's first row, [N]."""
    seen: Longs
    """End of the rows that it sees, [N]."""
    own: Longs
    """Row of each target's own event, [M]."""

    @classmethod
    def read(cls, folder: Path) -> Places:
        """Map the places of a bucket's sequences.

        Raises:
            OSError: A file is missing.
            ValueError: It is damaged.
        """
        entries, targets = (read_columns(folder / name)[0] for name in (ENTRIES_FILE, OWN_FILE))
        return cls(**{name: values.to_numpy() for name, values in (entries | targets).items()})

    def write(self, folder: Path) -> None:
        """Write the places beside the sequences; equal values give equal bytes."""
        names = ("shown", "late", "first", "seen")
        write_columns(folder / ENTRIES_FILE, {name: pa.array(getattr(self, name)) for name in names})
        write_columns(folder / OWN_FILE, {"own": pa.array(self.own)})


class InterleavedSource(RaggedSource):
    """Segments of one role over several buckets as interleaved tokens.

    Args:
        parts: See `RaggedSource`.
        places: Of each bucket.
        tables: See `RaggedSource`.
        role: See `RaggedSource`.
        replay: See `RaggedSource`.
    """

    def __init__(
        self,
        parts: Sequence[Ragged],
        places: Sequence[Places],
        tables: Sequence[dict[str, Ints]],
        role: int,
        replay: int = 0,
    ) -> None:
        super().__init__(parts, tables, role, replay)
        self._places = list(places)

    @property
    def lengths(self) -> Longs:
        """Tokens of each segment, [S]."""
        total = np.zeros(len(self._part), np.int64)
        for number, places in enumerate(self._places):
            mine = np.flatnonzero(self._part == number)
            begin, (entries, targets) = self._begin[mine], self._pieces[mine].T
            items = np.append(0, np.cumsum(places.late == 0))
            beyond = places.own[self._own(mine)] >= np.repeat(begin + entries, targets)
            extra = np.bincount(np.repeat(np.arange(len(mine)), targets), weights=beyond, minlength=len(mine))
            total[mine] = entries + items[begin + entries] - items[begin] + extra.astype(np.int64)
        return total

    def take(self, segments: Longs) -> tuple[dict[str, npt.NDArray[Any]], Any]:
        """Return the tokens of segments, end to end, and the event ids of their targets; see `RaggedSource.take`."""
        base, events = super().take(segments)
        entries, shown = self._entries(segments, base)
        made = interleave(entries)
        columns = columns_of(made, base, shown, self._features)
        number = np.cumsum(entries.is_target) - 1
        return columns, events.take(pa.array(number[made.source[made.kind == TARGET]]))

    def _own(self, segments: Longs) -> Longs:
        """Return the targets of segments of one bucket, counted from its first."""
        part = self._parts[int(self._part[segments[0]])] if len(segments) else None
        return ranges(self._target[segments] - (part.num_history if part else 0), self._pieces[segments, 1])

    def _entries(self, segments: Longs, base: dict[str, npt.NDArray[Any]]) -> tuple[Entries, Longs]:
        """Return what interleaving needs of segments, and shown_at of their entries, [B]."""
        pieces = self._pieces[segments]
        counts = pieces.sum(axis=1)
        ends = np.cumsum(counts)
        is_target = base["supervise"] != 0
        values = {name: np.zeros(len(is_target), np.int64) for name in ("late", "place", "first", "seen", "shown")}
        for number in np.unique(self._part[segments]):
            places, mine = self._places[number], np.flatnonzero(self._part[segments] == number)
            begin, (entries, targets) = self._begin[segments[mine]], pieces[mine].T
            old, row = ranges(ends[mine] - counts[mine], entries), ranges(begin, entries)
            new = ranges(ends[mine] - targets, targets)
            shift = np.repeat(begin, entries)
            values["late"][old], values["shown"][old], values["place"][old] = (
                places.late[row],
                places.shown[row],
                row - shift,
            )
            values["first"][old], values["seen"][old] = (
                np.maximum(each[row] - shift, 0) for each in (places.first, places.seen)
            )
            values["place"][new] = places.own[self._own(segments[mine])] - np.repeat(begin, targets)
        made = Entries(
            pieces=pieces,
            is_target=is_target,
            late=values["late"] != 0,
            place=values["place"],
            first=np.where(is_target, base["lo"], values["first"]),
            seen=np.where(is_target, base["hi"], values["seen"]),
            since=base["lo"].astype(np.int64),
        )
        return made, values["shown"]
