"""The timeline of each user: events by user and time, and the history tokens they become.

Sorting is what costs here, so that what comes sorted stays as it is: the event table hands rows out by (user_id, shown_at,
event_id), and history by visible_at is all but sorted then. Users and times become one integer key where 63 bits hold
both; text is compared only where times tie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gr_core.data.intervals import Longs, first_not_before, starts_of
from gr_core.schema import action_time

Ints = npt.NDArray[np.int32]

KEY_BITS = 63
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """History tokens of all users in (user, time, event_id) order. N tokens, E events, U users."""

    event: Longs
    """Event row of each token, [N]."""
    user: Longs
    """[N]."""
    time: Longs
    """visible_at, or the action's own time for a late action, us, [N]."""
    actions: Ints
    """Action bits known then, [N]."""
    starts: Longs
    """Boundaries of the users, [U + 1]."""
    shown: Longs
    """shown_at of every event row, us, [E]."""
    keys: _Keys
    """How (user, time) is written as one number."""
    key: Longs | None
    """That number of each token, ascending, [N]; None where 63 bits do not hold it."""

    def only(self, kept: npt.NDArray[np.bool_]) -> Timeline:
        """Return the timeline with only some of its tokens, [N]."""
        place = np.append(0, np.cumsum(kept))
        return replace(
            self,
            event=self.event[kept],
            user=self.user[kept],
            time=self.time[kept],
            actions=self.actions[kept],
            starts=place[self.starts],
            key=None if self.key is None else self.key[kept],
        )

    def before(self, user: Longs, time: Longs) -> Longs:
        """Return for each (user, time) the end of that user's history strictly before the time, [Q]."""
        if self.key is not None:
            return np.searchsorted(self.key, self.keys.of(user, time))
        return first_not_before(self.time, self.starts[:-1][user], self.starts[1:][user], time)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """One int64 for (user, time): user above, time from `first` on below."""

    first: int
    bits: int
    fit: bool
    """Whether KEY_BITS hold both."""

    @classmethod
    def over(cls, num_users: int, *times: Longs) -> _Keys:
        first = min((int(each.min()) for each in times if len(each)), default=0)
        last = max((int(each.max()) for each in times if len(each)), default=0)
        # Two more than there are times: for what lies before the first and after the last.
        bits = (last - first + 2).bit_length()
        return cls(first=first, bits=bits, fit=bits + num_users.bit_length() <= KEY_BITS)

    def of(self, user: Longs, time: Longs) -> Longs:
        """Return the keys; times outside the range are as good as its ends."""
        return (user << self.bits) + np.clip(time - (self.first - 1), 0, (1 << self.bits) - 1)


def in_order(events: pl.DataFrame) -> tuple[pl.DataFrame, Longs, pl.Series]:
    """Bring rows into (user_id, shown_at, event_id) order, unless they are.

    Args:
        events: Event table columns user_id, shown_at, event_id and others.

    Returns:
        The rows, the user number of each [E], and the users in text order [U].
    """
    found = _users_if_sorted(events)
    if found is None:
        events = events.sort("user_id", "shown_at", "event_id")
        found = _user_numbers(events["user_id"])
    return events, *found


def _user_numbers(column: pl.Series) -> tuple[Longs, pl.Series]:
    """Number the runs of equal users."""
    if not len(column):
        return np.zeros(0, np.int64), column
    changes = (column != column.shift()).fill_null(value=True).to_numpy()
    return np.cumsum(changes) - 1, column.filter(pl.Series(changes))


def _users_if_sorted(events: pl.DataFrame) -> tuple[Longs, pl.Series] | None:
    """Return the users of rows that are in order; None where they are not."""
    user, heads = _user_numbers(events["user_id"])
    if len(heads) > 1 and not bool((heads.slice(1) > heads.head(len(heads) - 1)).all()):
        return None
    shown = events["shown_at"].dt.timestamp("us").to_numpy()
    step, same = np.diff(shown), np.diff(user) == 0
    if (same & (step < 0)).any():
        return None
    ties = np.flatnonzero(same & (step == 0))
    ids = events["event_id"]
    return (user, heads) if bool((ids.gather(ties) < ids.gather(ties + 1)).all()) else None


def timeline(rows: pl.DataFrame, user: Longs, active: npt.NDArray[np.bool_], action_names: tuple[str, ...]) -> Timeline:
    """Lay out the history of users: each event at visible_at, and each later action as a token of its own.

    Args:
        rows: Events in the order of `in_order`.
        user: The user number of each, [E].
        active: Whether a user's history is wanted, [U].
        action_names: All actions in bit order.

    Returns:
        The tokens of active users; the others have none.
    """
    shown = rows["shown_at"].dt.timestamp("us").to_numpy()
    event, time, actions = _tokens(rows, np.flatnonzero(active[user]), action_names)
    keys = _Keys.over(len(active), time, shown)
    key = keys.of(user[event], time) if keys.fit else None
    if key is not None:
        # Stable, and nearly sorted already: a run of events, then one of late actions.
        order = np.argsort(key, kind="stable")
        key = key[order]
    else:
        order = np.lexsort((time, user[event]))
    event, time, actions = event[order], time[order], actions[order]
    moved = _ties_by_event(rows["event_id"], user, event, time, shown)
    if moved is not None:
        event, actions = event[moved], actions[moved]
    owner = user[event]
    return Timeline(
        event=event,
        user=owner,
        time=time,
        actions=actions,
        starts=starts_of(owner, len(active)),
        shown=shown,
        keys=keys,
        key=key,
    )


def _tokens(rows: pl.DataFrame, event: Longs, action_names: tuple[str, ...]) -> tuple[Longs, Longs, Ints]:
    """Return event row, time and action bits of the tokens of some events: all at visible_at, then the late ones."""
    visible = rows["visible_at"].dt.timestamp("us").to_numpy()
    taken = rows["actions"].to_numpy()
    actions = taken.copy()
    late_event, late_time, late_bit = [], [], []
    for bit, name in enumerate(action_names):
        times = rows[action_time(name)]
        if times.null_count() == len(times):
            continue
        # An action without a time counts as known at visible_at.
        at = times.dt.timestamp("us").fill_null(_NEVER).to_numpy()
        late = event[((taken[event] >> bit & 1) == 1) & (at[event] > visible[event])]
        actions[late] &= ~np.int32(1 << bit)
        late_event.append(late)
        late_time.append(at[late])
        late_bit.append(np.full(len(late), 1 << bit, dtype=np.int32))
    if late_event:
        merged = _merge_moments(*(np.concatenate(parts) for parts in (late_event, late_time, late_bit)))
    else:
        merged = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))
    return (
        np.concatenate([event, merged[0]]),
        np.concatenate([visible[event], merged[1]]),
        np.concatenate([actions[event], merged[2]]),
    )


def _merge_moments(event: Longs, time: Longs, bits: Ints) -> tuple[Longs, Longs, Ints]:
    """Let actions of one event at one moment share a token; by (event, time)."""
    order = np.lexsort((time, event))
    event, time, bits = event[order], time[order], bits[order]
    first = np.flatnonzero(np.append(True, (np.diff(event) != 0) | (np.diff(time) != 0))[: len(event)])
    return event[first], time[first], np.bitwise_or.reduceat(bits, first) if len(first) else bits


def _ties_by_event(ids: pl.Series, user: Longs, event: Longs, time: Longs, shown: Longs) -> Any:
    """Return the order that puts tokens of one user and time by event_id; None where they are so already."""
    tied = (np.diff(time) == 0) & (np.diff(user[event]) == 0)
    # Events of one user and shown_at stand by event_id in the rows, so the row number tells their order.
    told = (shown[event[1:]] == shown[event[:-1]]) & (event[1:] > event[:-1])
    if not (tied & ~told).any():
        return None
    member = np.append(tied, False) | np.append(False, tied)
    place = np.flatnonzero(member)
    group = np.cumsum(np.append(True, ~tied))[place]
    frame = pl.DataFrame({"group": group, "id": ids.gather(event[place]), "place": place})
    order = np.arange(len(event))
    order[place] = frame.sort("group", "id", maintain_order=True)["place"].to_numpy()
    return order
