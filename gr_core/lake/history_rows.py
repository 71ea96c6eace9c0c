"""How much of a user entries keep, and whether that is enough for a target: numpy over rows sorted by user.

A row's newest token is its visible_at or its last late action. A user's head entry has every row whose newest token is
not below its floor, and maybe a few older ones; a floor of NEVER: nothing was left out. What a busy user did before lies
in his deep entry, down to a floor of its own, and is read for late targets only. A night adds its rows to the head,
whatever their times; when the head has grown too long, both entries are cut anew. So head and deep entry together are
complete down to the deep floor, at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gr_core.refs import NEVER

Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# In units of max_history: least and most rows of a head when it is cut, and of both entries together.
_HEAD, _MOST_HEAD = 1.2, 6
_ALL, _MOST_ALL = 3, 32
_GROWTH = 1.6  # times its rows when it was cut, a head is cut anew


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRows:
    """Rows of users, each user's together: the times that decide."""

    starts: Longs
    """Boundaries of the users, [U + 1]."""
    visible: Longs
    """visible_at, us, [N]."""
    newest: Longs
    """Time of the row's newest token, us, [N]."""

    @property
    def user(self) -> Longs:
        """Number of each row's user, [N]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def user_rows(rows: pl.DataFrame, times: Sequence[str]) -> UserRows:
    """Take the times of rows in which each user's stand together.

    Args:
        rows: user_id, visible_at, actions and the action times.
        times: The action times, in bit order.
    """
    first = rows.select(pl.col("user_id").ne_missing(pl.col("user_id").shift())).to_series().to_numpy()
    visible = rows["visible_at"].dt.timestamp("us").to_numpy()
    newest, actions = visible, rows["actions"].to_numpy()
    for bit, name in enumerate(times):
        if rows[name].null_count() < rows.height:
            taken = rows[name].dt.timestamp("us").fill_null(NEVER).to_numpy()
            newest = np.where(actions >> bit & 1 == 1, np.maximum(newest, taken), newest)
    starts = np.append(np.flatnonzero(first), len(visible)).astype(np.int64)
    return UserRows(starts=starts, visible=visible, newest=newest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """How long the entries of each user shall be, [U] each."""

    head: Longs
    """Rows of a head that is cut."""
    total: Longs
    """Rows of head and deep entry."""
    over: Bools
    """Whether the rows at hand are too many for a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Rows shared out to entries."""

    head: Bools
    """[N]."""
    head_floors: Longs
    """[U]."""
    deep: Bools
    """Rows of deep entries, of the users that were cut only, [N]."""
    deep_floors: Longs
    """One a user that was cut, in their order."""


def cuts(rows: UserRows, max_history: int, recent_from_us: int, late_from_us: int) -> Cuts:
    """Work out how long entries shall be, by what the users did lately.

    A target shown at or after `recent_from_us` finds max_history tokens before it in the head, one at or after
    `late_from_us` in head and deep entry, as far as the limits allow.

    Args:
        rows: What is known of the users.
        max_history: History tokens that a target can see.
        recent_from_us: Start of what will usually be a target.
        late_from_us: Start of what a late row may make one.
    """
    begin = rows.starts[:-1]

    def wanted(start: int, least: float, most: float) -> Longs:
        since = np.add.reduceat((rows.newest >= start).astype(np.int64), begin) if len(begin) else begin
        return np.clip(since + max_history, int(np.ceil(least * max_history)), int(most * max_history))

    head = wanted(recent_from_us, _HEAD, _MOST_HEAD)
    total = np.maximum(wanted(late_from_us, _ALL, _MOST_ALL), head)
    return Cuts(head=head, total=total, over=np.diff(rows.starts) > _GROWTH * head)


def split(rows: UserRows, floors: Longs, wanted: Cuts) -> Split:
    """Share rows out to entries: all to the head where it is not over its limit.

    Args:
        rows: What is known of the users; of those over the limit with their deep entries.
        floors: It is complete from here on, [U].
        wanted: How long the entries shall be.
    """
    count, user = np.diff(rows.starts), rows.user
    head, deep = np.ones(len(user), np.bool_), np.zeros(len(user), np.bool_)
    cut = np.flatnonzero(wanted.over)
    if not len(cut):
        return Split(head=head, head_floors=floors, deep=deep, deep_floors=floors[cut])
    place = _ragged(rows.starts[cut], count[cut])
    times, owner = rows.newest[place], np.repeat(np.arange(len(cut)), count[cut])
    times, ends = times[np.lexsort((times, owner))], np.cumsum(count[cut])

    def nth_newest(number: Longs) -> Longs:
        return np.asarray(times[ends - np.minimum(number, count[cut])])

    head_floors, deep_floors = floors.copy(), floors[cut]
    head_floors[cut] = np.maximum(floors[cut], nth_newest(wanted.head[cut]))
    more = count[cut] > wanted.total[cut]
    deep_floors = np.where(more, np.maximum(deep_floors, nth_newest(wanted.total[cut])), deep_floors)
    # The newest row stands in both entries, so that neither is ever without a row; one too many does no harm.
    newest = rows.newest[place] == np.maximum.reduceat(rows.newest, rows.starts[:-1])[cut][owner]
    head[place] = (rows.newest[place] >= head_floors[cut][owner]) | newest
    deep[place] = ((rows.newest[place] >= deep_floors[owner]) & ~head[place]) | newest
    return Split(head=head, head_floors=head_floors, deep=deep, deep_floors=deep_floors)


def too_short(rows: UserRows, floors: Longs, oldest_target: Longs, max_history: int, reach_us: int) -> Bools:
    """Tell whose rows may lack history that a target sees with all rows.

    Args:
        rows: What is known of the users.
        floors: It is complete from here on, [U].
        oldest_target: shown_at of each user's oldest target, [U]; a user without one: the largest int64.
        max_history: History tokens that a target can see.
        reach_us: How old history may be, counted back from the target.

    Returns:
        [U].
    """
    if not len(floors):
        return np.zeros(0, np.bool_)
    user = rows.user
    floor = floors[user]
    # one token a row, though it may have more: counted too low, never too high
    token = np.where(rows.visible >= floor, rows.visible, rows.newest)
    seen = (token >= floor) & (token < oldest_target[user])
    enough = np.add.reduceat(seen.astype(np.int64), rows.starts[:-1]) >= max_history
    never = np.iinfo(np.int64).max
    return (floors > NEVER) & (oldest_target < never) & ~enough & (oldest_target - reach_us < floors)


def _ragged(begin: Longs, length: Longs) -> Any:
    """Return begin[i], begin[i] + 1, ... of each of the slices, end to end."""
    return np.arange(int(length.sum())) + np.repeat(begin - (np.cumsum(length) - length), length)
