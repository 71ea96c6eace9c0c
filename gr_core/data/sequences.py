"""Sequences of one bucket: history and targets of each user with something due, cut into segments.

In: rows of the event table, the bits that are due in each by role, and which rows count for the vocabulary. Out:
`Sequences`: rows of tokens with features as codes, segments as ranges of rows (gr_core.data.ragged), and the dictionaries
that the codes point into. Which tokens see which is decided in intervals.py; here events become rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from gr_core.data import ragged, vocabulary
from gr_core.data.interleaved import ENTRY_TOKENS, Places
from gr_core.data.intervals import Cut, Limits, Longs, cut, starts_of
from gr_core.data.ragged import Ragged
from gr_core.data.timeline import Timeline, in_order, timeline

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int32]

# Rows are written so many at a time: a row is wider than a cache line's share, and a block of them stays in the cache.
_BLOCK = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRules:
    """What a token carries and how much of a user a target sees."""

    action_names: tuple[str, ...]
    """All actions in bit order."""
    features: tuple[str, ...]
    """Item features, then context features: item_id and side features."""
    item_features: tuple[str, ...]
    """Features of history tokens too; the others are absent there."""
    max_history: int
    """History tokens that a target can see."""
    max_targets: int
    """Target tokens in a segment."""
    max_age_us: int
    """Oldest history, counted back from the target's shown_at."""
    token_budget: int
    """Most tokens of a segment."""
    time_window_us: int | None = None
    """W, see intervals.Limits; None: no window."""
    fallback_by: tuple[tuple[str, str], ...] = ()
    """(feature, the side feature that tells its ids' types) of the features that have types."""
    tokens: str = "targets"
    """pack.tokens."""
    event_weight: str | None = None
    """Side feature whose number is an event's weight (pack.event_weight); None: every event weighs 1."""

    @property
    def limits(self) -> Limits:
        """The part that decides segments and intervals."""
        return Limits(
            max_history=self.max_history,
            max_targets=self.max_targets,
            max_age_us=self.max_age_us,
            token_budget=self.token_budget,
            time_window_us=self.time_window_us,
            entry_tokens=ENTRY_TOKENS if self.tokens == "interleaved" else 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The segments of one bucket and what their codes mean."""

    ragged: Ragged
    """Rows and segments; bit k of a segment's roles is the k-th role that was asked for."""
    ids: dict[str, pl.DataFrame]
    """Feature -> vocabulary.COUNTS of each code from ragged.FIRST_CODE on: id, type, and in how many counted rows."""
    places: Places | None = None
    """What interleaving needs besides; None: pack.tokens = targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Targets that are cut together: those of one role, of users who do not share another role's segments."""

    target: Longs
    """Event row of each target, in (user, shown_at, event_id) order, [M]."""
    mask: Ints
    """Its due bits, [M]."""
    user: Longs
    """Its user, [M]."""
    roles: npt.NDArray[np.uint8]
    """Roles of each user's segments, [U]."""


def build_sequences(
    events: pl.DataFrame, masks: Mapping[str, pl.Series], rules: SequenceRules, *, counted: pl.Series | None = None
) -> Sequences:
    """Build the segments of all users that have a target, for several roles at once.

    History stands in (time, event_id) order, where time is visible_at, or the action's own time for a late action;
    targets in (shown_at, event_id) order. The order of input rows changes nothing. Targets carry no action: what a
    token shows was known strictly before the shown_at of every target that sees it. Where a user's targets are the same
    in two roles, both share the segments.

    Args:
        events: Rows of one bucket with the event table's columns, in any order (quickest in that of EventTable.read);
            all rows of each user with a target. Other users may be there and are ignored. event_id is unique.
        masks: Role -> Int32, one a row of `events`: due (or new) bits; 0 and null: no target. At most 8 roles.
        rules: The rules.
        counted: Boolean, one a row of `events`: its ids count for the vocabulary; None: no row does.

    Returns:
        The sequences. Every row with a mask is exactly one target of that role, with label_known = its mask.

    Raises:
        ValueError: The length of a mask, or of `counted`, is not that of `events`.
    """
    columns = {f"_{number}": mask.cast(pl.Int32).fill_null(0) for number, mask in enumerate(masks.values())}
    columns["_counted"] = pl.repeat(value=False, n=len(events), eager=True) if counted is None else counted
    for values in columns.values():
        if len(values) != len(events):
            raise ValueError(f"a mask must have one entry a row, got {len(values)} for {len(events)} rows")
    rows, user, users = in_order(events.with_columns(values.alias(name) for name, values in columns.items()))
    bits = [rows[f"_{number}"].to_numpy() for number in range(len(masks))]
    active = np.zeros(len(users), np.bool_)
    for mask in bits:
        active[user[mask != 0]] = True
    line = timeline(rows, user, active, rules.action_names)
    passes = _passes(user, len(users), bits)
    cuts = [_cut(line, part, rules.limits) for part in passes]
    targets = np.concatenate([np.zeros(0, np.int64), *(part.target for part in passes)])
    places = None
    if rules.tokens == "interleaved":
        visible = rows["visible_at"].dt.timestamp("us").to_numpy()
        line, cuts = _seen(line, cuts, _own(line, visible)[targets])
        places = _places(line, visible, targets, rules.time_window_us)
    else:
        line, cuts = _seen(line, cuts, targets[:0])
    codes, ids = _codes(rows, np.append(line.event, targets), rules)

    num_history, actions = len(line.event), rows["actions"].to_numpy()
    out = np.empty((num_history + len(targets), ragged.width(len(rules.features))), dtype=np.int32)
    _write_history(out[:num_history], rows["known"].to_numpy(), line, codes, rules)
    at = num_history
    for part, made in zip(passes, cuts, strict=True):
        _write_targets(out[at : at + len(part.target)], actions, line.shown, part, made, codes)
        at += len(part.target)
    segments = _segments(passes, cuts, num_history)
    has_segment, segments["user"] = np.unique(segments["user"], return_inverse=True)
    made_rows = Ragged(
        features=rules.features,
        rows=out,
        num_history=num_history,
        users=_arrow(users, has_segment),
        event_ids=_arrow(rows["event_id"], targets),
        weight=_weights(rows[rules.event_weight], targets) if rules.event_weight else None,
        **{name: segments[name].astype(kind, copy=False) for name, kind in ragged.SEGMENT_TYPES.items()},
    )
    return Sequences(ragged=made_rows, places=places, ids=ids)


def _arrow(texts: pl.Series, places: Longs) -> Any:
    """Return some entries of a text column as a pyarrow large_string array."""
    if not (len(places) == len(texts) and np.array_equal(places, np.arange(len(texts)))):
        texts = texts.gather(places)
    return texts.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_string())


def _weights(values: pl.Series, places: Longs) -> npt.NDArray[np.float32]:
    """Return the weights that some events' texts say, fp32; 1 where a text is no finite number of at least 0, counted."""
    found = values.gather(places).cast(pl.Float32, strict=False)
    usable = (found.is_finite() & (found >= 0)).fill_null(value=False)
    if not usable.all():
        wrong = values.gather(places).filter(~usable)
        logger.warning(
            "pack.event_weight: %d of %d events have no usable weight in %s (such as %r); they weigh 1",
            *(len(wrong), len(places), values.name, wrong[0]),
        )
    return found.set(~usable, 1.0).to_numpy()


def _own(line: Timeline, visible: Longs) -> Longs:
    """Return the history row of each event itself (not of a later action), [E]; -1 where its user has no history."""
    own = np.full(len(visible), -1, np.int64)
    itself = np.flatnonzero(line.time == visible[line.event])
    own[line.event[itself]] = itself
    return own


def _places(line: Timeline, visible: Longs, targets: Longs, window_us: int | None) -> Places:
    shown = line.shown[line.event]
    first = line.starts[:-1][line.user]
    if window_us is not None:
        first = np.maximum(first, line.before(line.user, shown - window_us))
    return Places(
        shown=shown,
        late=(line.time > visible[line.event]).astype(np.uint8),
        first=first,
        seen=line.before(line.user, shown),
        own=_own(line, visible)[targets],
    )


def _seen(line: Timeline, cuts: Sequence[Cut], also: Longs) -> tuple[Timeline, list[Cut]]:
    """Leave out the history that no segment shows, but for some rows."""
    size = len(line.event) + 1
    opened = sum(np.bincount(made.begin, minlength=size) for made in cuts)
    closed = sum(np.bincount(made.begin + made.num_history, minlength=size) for made in cuts)
    kept = np.cumsum(opened - closed)[:-1] > 0
    kept[also] = True
    if kept.all():
        return line, list(cuts)
    place = np.append(0, np.cumsum(kept))
    return line.only(kept), [Cut(first=made.first, lo=place[made.lo], hi=place[made.hi]) for made in cuts]


def _codes(rows: pl.DataFrame, shown: Longs, rules: SequenceRules) -> tuple[dict[str, Ints], dict[str, pl.DataFrame]]:
    """Return codes of every feature by row, and the dictionaries with their counts.

    Only rows that count or become tokens (`shown`) are looked at: what else was read cannot show in the result.
    """
    by, counted = dict(rules.fallback_by), rows["_counted"].to_numpy()
    used = counted.copy()
    used[shown] = True
    names = dict.fromkeys([*rules.features, *(by[name] for name in rules.features if name in by)])
    some = rows.select(*names) if used.all() else rows.select(*names).filter(pl.Series(used))
    codes, ids = {}, {}
    for name in rules.features:
        own, found = vocabulary.dictionary(some, name, by.get(name))
        counts = np.bincount(own[counted[used]], minlength=ragged.FIRST_CODE + len(found))[ragged.FIRST_CODE :]
        ids[name] = found.with_columns(count=pl.Series(counts, dtype=pl.Int64))
        codes[name] = own
        if len(some) < len(rows):
            codes[name] = np.zeros(len(rows), dtype=np.int32)
            codes[name][used] = own
    return codes, ids


def _passes(user: Longs, num_users: int, bits: Sequence[Ints]) -> list[_Pass]:
    """Share out the roles: a user's targets that are equal in two roles are cut once."""
    starts = starts_of(user, num_users)

    def any_of(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        sums = np.append(0, np.cumsum(flags))
        return np.asarray(sums[starts[1:]] > sums[starts[:-1]])

    todo = [any_of(mask != 0) for mask in bits]
    passes = []
    for number, mask in enumerate(bits):
        own = todo[number].copy()
        roles: npt.NDArray[np.uint8] = own * np.uint8(1 << number)
        for other in range(number + 1, len(bits)):
            same = own & todo[other] & ~any_of(mask != bits[other])
            roles[same] |= np.uint8(1 << other)
            todo[other] &= ~same
        target = np.flatnonzero((mask != 0) & own[user])
        passes.append(_Pass(target=target, mask=mask[target], user=user[target], roles=roles))
    return passes


def _cut(line: Timeline, part: _Pass, limits: Limits) -> Cut:
    num_users = len(line.starts) - 1
    shown = line.shown[part.target]
    return cut(line.time, line.starts, shown, starts_of(part.user, num_users), limits, line.before(part.user, shown))


def _write_history(out: Ints, known: Ints, line: Timeline, codes: Mapping[str, Ints], rules: SequenceRules) -> None:
    times = ragged.times(out)
    lo = line.starts[:-1][line.user]
    if rules.time_window_us is not None:
        lo = np.maximum(lo, line.before(line.user, line.time - rules.time_window_us))
    for begin in range(0, len(out), _BLOCK):
        at = slice(begin, begin + _BLOCK)
        block, event = out[at], line.event[at]
        times[at] = line.time[at]
        block[:, ragged.BITS] = line.actions[at]
        block[:, ragged.KNOWN] = known[event]
        block[:, ragged.LO] = lo[at]
        block[:, ragged.HI] = np.arange(begin, begin + len(block))
        block[:, ragged.WORDS :] = ragged.PAD_CODE
        for word, name in enumerate(rules.features, ragged.WORDS):
            if name in rules.item_features:
                block[:, word] = codes[name][event]


def _write_targets(out: Ints, actions: Ints, shown: Longs, part: _Pass, made: Cut, codes: Mapping[str, Ints]) -> None:
    times = ragged.times(out)
    for begin in range(0, len(out), _BLOCK):
        at = slice(begin, begin + _BLOCK)
        block, event, mask = out[at], part.target[at], part.mask[at]
        times[at] = shown[event]
        block[:, ragged.BITS] = actions[event] & mask
        block[:, ragged.KNOWN] = mask
        block[:, ragged.LO], block[:, ragged.HI] = made.lo[at], made.hi[at]
        block[:, ragged.WORDS :] = ragged.PAD_CODE
        for word, values in enumerate(codes.values(), ragged.WORDS):
            block[:, word] = values[event]


def _segments(passes: Sequence[_Pass], cuts: Sequence[Cut], num_history: int) -> dict[str, npt.NDArray[Any]]:
    """Return the segments' columns, by (user, first target) within a pass; users are event users still."""
    columns: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in ("user", "roles", "begin", "history", "target", "targets")
    }
    at = num_history
    for part, made in zip(passes, cuts, strict=True):
        user = part.user[made.first]
        values: tuple[npt.NDArray[Any], ...] = (
            user,
            part.roles[user],
            made.begin,
            made.num_history,
            at + made.first,
            made.num_targets,
        )
        for name, column in zip(columns, values, strict=True):
            columns[name].append(column)
        at += len(part.target)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.lexsort((joined["target"], joined["user"]))
    return {name: column[order] for name, column in joined.items()}


def save(sequences: Sequences, folder: Path) -> None:
    """Write a bucket's sequences and dictionaries into an empty folder; equal sequences give equal bytes."""
    ragged.write(sequences.ragged, folder)
    if sequences.places is not None:
        sequences.places.write(folder)
    for name, ids in sequences.ids.items():
        # A type that is null has no text: what lies under a null is not the same in every run.
        known = ids["type"].is_not_null().cast(pl.UInt8)
        columns = {"id": ids["id"], "type": ids["type"].fill_null(""), "typed": known, "count": ids["count"]}
        ragged.write_columns(
            folder / f"{name}.ids.arrow",
            {key: values.to_arrow(compat_level=pl.CompatLevel.oldest()) for key, values in columns.items()},
        )


def load_ids(folder: Path, name: str) -> pl.DataFrame:
    """Read a feature's dictionary: vocabulary.COUNTS in code order.

    Raises:
        OSError: The file is missing.
        ValueError: It is damaged.
    """
    columns, _ = ragged.read_columns(folder / f"{name}.ids.arrow")
    frame = pl.DataFrame({key: pl.Series(values) for key, values in columns.items()})
    kind = pl.when(pl.col("typed") == 1).then("type").otherwise(None).alias("type")
    return frame.select("id", kind, "count").cast(vocabulary.COUNTS)
