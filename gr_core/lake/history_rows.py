"""How much of a user an entry keeps, and whether that is enough for a target: numpy over rows sorted by user.

A row's newest token is its visible_at or its last late action. An entry keeps the rows whose newest token is not below
its floor, so every token at or after the floor is in it, and maybe a few older ones. A floor of NEVER: nothing was left
out.
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

_SPARE, _MOST = 1.5, 6


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


def cap(rows: UserRows, floors: Longs, max_history: int, recent_from_us: int) -> tuple[Bools, Longs]:
    """Choose the rows that entries keep.

    A target shown at or after `recent_from_us` finds max_history tokens before it among the rows kept: all since then
    and max_history older ones, at least 1.5 and at most 6 times max_history.

    Args:
        rows: All that is known of the users.
        floors: What is known of each user is complete from here on, [U].
        max_history: History tokens that a target can see.
        recent_from_us: Start of what may soon be a target.

    Returns:
        Which rows to keep, [N], and the floors of the entries, [U].
    """
    count = np.diff(rows.starts)
    if not len(count):
        return np.ones(0, np.bool_), floors
    recent = np.add.reduceat((rows.newest >= recent_from_us).astype(np.int64), rows.starts[:-1])
    least = int(np.ceil(_SPARE * max_history))
    wanted = np.clip(recent + max_history, least, _MOST * max_history)
    floors = floors.copy()
    heavy = np.flatnonzero(count > wanted)
    if len(heavy):
        place = _ragged(rows.starts[heavy], count[heavy])
        times = rows.newest[place]
        owner = np.repeat(np.arange(len(heavy)), count[heavy])
        times = times[np.lexsort((times, owner))]
        floors[heavy] = np.maximum(floors[heavy], times[np.cumsum(count[heavy]) - wanted[heavy]])
    user = rows.user
    # the newest row stays in any case, so that no entry is without a row; an older one than the floor does no harm
    last = np.maximum.reduceat(rows.newest, rows.starts[:-1])
    return rows.newest >= np.minimum(floors, last)[user], floors


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
