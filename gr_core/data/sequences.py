"""Sequences of one bucket: history and targets of each user with something due, cut into segments.

In: rows of the event table and the bits that are due in each. Out: `Sequences`, flat over tokens with features still as
text, segment by segment. Which tokens see which is decided in intervals.py; here events become tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gr_core.data.intervals import Layout, Limits, Longs, lay_out, starts_of
from gr_core.errors import ConfigError
from gr_core.schema import action_time

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRules:
    """What a token carries and how much of a user a target sees."""

    action_names: tuple[str, ...]
    """All actions in bit order."""
    features: tuple[str, ...]
    """Item features, then context features: item_id and side features."""
    item_features: tuple[str, ...]
    """Features of history tokens too; the others are null there."""
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
    carry: tuple[str, ...] = ()
    """Further side features to carry as text on all tokens (a vocabulary's fallback_by)."""
    tokens: str = "targets"
    """pack.tokens."""

    @property
    def limits(self) -> Limits:
        """The part that decides segments and intervals."""
        return Limits(
            max_history=self.max_history,
            max_targets=self.max_targets,
            max_age_us=self.max_age_us,
            token_budget=self.token_budget,
            time_window_us=self.time_window_us,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Segments in the order of (user_id, first target), tokens flat over them."""

    tokens: pl.DataFrame
    """One row a token: features as text (null: unknown), the pack's columns with segment-relative lo and hi, event_id
    (null on history tokens)."""
    segments: pl.DataFrame
    """One row a segment: user_id, length, num_targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _History:
    """History tokens of all users in (user, time, event_id) order."""

    event: Longs
    time: Longs
    actions: Ints
    starts: Longs


def build_sequences(events: pl.DataFrame, target_mask: pl.Series, config: SequenceRules) -> Sequences:
    """Build the segments of all users that have a target.

    History stands in (time, event_id) order, where time is visible_at, or the action's own time for a late action;
    targets in (shown_at, event_id) order. The order of input rows changes nothing. Targets carry no action: what a
    token shows was known strictly before the shown_at of every target that sees it.

    Args:
        events: Rows of one bucket with the event table's columns, in any order; all rows of each user with a target.
            Other users may be there and are ignored. event_id is unique.
        target_mask: Int32, one a row of `events`: due (or new) bits; 0 and null: no target.
        config: The rules.

    Returns:
        The sequences. Every row with a mask is exactly one target, with label_known = its mask.

    Raises:
        ConfigError: pack.tokens is not "targets".
        ValueError: The mask's length is not that of `events`.
    """
    if config.tokens != "targets":
        raise ConfigError(
            f'pack.tokens must be "targets" in this release, got {config.tokens!r}; set pack.tokens = "targets"',
            where="pack.tokens",
        )
    if len(target_mask) != len(events):
        raise ValueError(f"target_mask must have one entry a row, got {len(target_mask)} for {len(events)} rows")
    masked = events.with_columns(target_mask.cast(pl.Int32).fill_null(0).alias("_mask"))
    rows = masked.filter((pl.col("_mask") != 0).any().over("user_id"))
    users = rows["user_id"].unique().sort()
    # Codes in text order, so that numpy sorts integers; event_id only breaks ties of time, never the item.
    user = rows["user_id"].cast(pl.Enum(users)).to_physical().to_numpy().astype(np.int64)
    tie = rows["event_id"].rank("ordinal").to_numpy()
    mask = rows["_mask"].to_numpy()
    shown = _micros(rows["shown_at"])

    history = _history(rows, user, tie, config.action_names, len(users))
    target = np.flatnonzero(mask)
    target = target[np.lexsort((tie[target], shown[target], user[target]))]
    target_starts = starts_of(user[target], len(users))
    layout = lay_out(history.time, history.starts, shown[target], target_starts, config.limits)
    segments = pl.DataFrame(
        {"user_id": users.gather(layout.user), "length": layout.lengths, "num_targets": layout.num_targets},
        schema={"user_id": pl.String, "length": pl.Int64, "num_targets": pl.Int64},
    )
    return Sequences(tokens=_tokens(rows, history, target, layout, config), segments=segments)


def _micros(times: pl.Series) -> Longs:
    return times.dt.timestamp("us").to_numpy()


def _history(rows: pl.DataFrame, user: Longs, tie: Any, action_names: tuple[str, ...], num_users: int) -> _History:
    """Return each event as a token at visible_at, and each later action as a token of its own."""
    visible = _micros(rows["visible_at"])
    actions = rows["actions"].to_numpy().copy()
    late_event, late_time, late_bit = [], [], []
    for bit, name in enumerate(action_names):
        times = rows[action_time(name)].dt.timestamp("us")
        # An action without a time counts as known at visible_at.
        taken = times.fill_null(np.iinfo(np.int64).min).to_numpy()
        late = np.flatnonzero((rows["actions"].to_numpy() >> bit & 1 == 1) & (taken > visible))
        actions[late] &= ~np.int32(1 << bit)
        late_event.append(late)
        late_time.append(taken[late])
        late_bit.append(np.full(len(late), 1 << bit, dtype=np.int32))
    event, time, bits = (np.concatenate(parts) for parts in (late_event, late_time, late_bit))
    if len(event):
        # Actions of one event at one moment share a token.
        order = np.lexsort((time, event))
        event, time, bits = event[order], time[order], bits[order]
        first = np.flatnonzero(np.append(True, (np.diff(event) != 0) | (np.diff(time) != 0)))
        event, time, bits = event[first], time[first], np.bitwise_or.reduceat(bits, first)
    event = np.concatenate([np.arange(len(rows)), event])
    time = np.concatenate([visible, time])
    bits = np.concatenate([actions, bits]).astype(np.int32)
    order = np.lexsort((tie[event], time, user[event]))
    event = event[order]
    return _History(event=event, time=time[order], actions=bits[order], starts=starts_of(user[event], num_users))


def _tokens(
    rows: pl.DataFrame, history: _History, target: Longs, layout: Layout, config: SequenceRules
) -> pl.DataFrame:
    """Fill the token columns of a layout."""
    is_target = layout.is_target
    past, due = layout.source[~is_target], target[layout.source[is_target]]
    event = np.empty(len(is_target), dtype=np.int64)
    event[~is_target], event[is_target] = history.event[past], due

    def column(dtype: type[np.generic], on_history: Any, on_targets: Any) -> npt.NDArray[Any]:
        values = np.empty(len(is_target), dtype=dtype)
        values[~is_target], values[is_target] = on_history, on_targets
        return values

    mask, known = rows["_mask"].to_numpy(), rows["known"].to_numpy()
    numbers = {
        "actions": column(np.int32, history.actions[past], 0),
        "known": column(np.int32, known[history.event[past]], 0),
        "labels": column(np.int32, 0, rows["actions"].to_numpy()[due] & mask[due]),
        "label_known": column(np.int32, 0, mask[due]),
        "time": column(np.int64, history.time[past], _micros(rows["shown_at"])[due]),
        "position": layout.position,
        "lo": layout.lo,
        "hi": layout.hi,
        "supervise": is_target.astype(np.uint8),
        "weight": np.ones(len(is_target), dtype=np.float32),
    }
    where = pl.Series(event)
    at_targets = where.set(pl.Series(~is_target), None)
    on_all = (*config.item_features, *config.carry)
    names = dict.fromkeys((*config.features, *config.carry))
    texts = {name: rows[name].gather(where if name in on_all else at_targets) for name in names}
    return pl.DataFrame({**texts, **numbers, "event_id": rows["event_id"].gather(at_targets)})
