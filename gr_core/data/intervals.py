"""Segments and attention intervals from times alone: one linear pass, numpy only, no Python per token.

In: the times of each user's history and targets. Out: `Layout`, which says for every token of every segment where it
comes from and which keys [lo, hi) it may attend to. sequences.py and synthetic.py share it, so that a pack written
without Polars follows the same rules (design section 4, "Sequences" and "Tokens"; example 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a target sees and how long a segment may be."""

    max_history: int
    """History tokens that a target can see."""
    max_targets: int
    """Target tokens in a segment."""
    max_age_us: int
    """Oldest history that a target sees, counted back from its shown_at."""
    token_budget: int
    """Most tokens of a segment; at least max_history + 1."""
    time_window_us: int | None = None
    """W: no token sees a key that became visible earlier than this before its own time; None: no window."""

    def __post_init__(self) -> None:
        """Check that one target with its history fits."""
        if self.max_history < 1 or self.max_targets < 1:
            raise ValueError(
                f"max_history and max_targets must be at least 1, got {self.max_history} and {self.max_targets}"
            )
        if self.token_budget < self.max_history + 1:
            raise ValueError(
                f"token_budget must be at least max_history + 1 = {self.max_history + 1}, got {self.token_budget}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where each token of each segment comes from, and what it sees. S segments, T tokens, flat over segments."""

    user: Longs
    """Number of each segment's user, [S], ascending; segments of a user in the order of their targets."""
    lengths: Longs
    """Tokens, [S]."""
    num_targets: Longs
    """Targets, the last tokens of the segment, [S]."""
    is_target: npt.NDArray[np.bool_]
    """[T]."""
    source: Longs
    """Row of the target arrays where is_target, else of the history arrays, [T]."""
    position: npt.NDArray[np.int32]
    """hi: how much history of the segment the token could see without limits, [T]."""
    lo: npt.NDArray[np.int32]
    """First key, counted from the segment's first token, [T]; non-decreasing within history and within targets."""
    hi: npt.NDArray[np.int32]
    """End of the keys, likewise."""


def first_not_before(times: Longs, begin: Longs, end: Longs, threshold: Longs) -> Longs:
    """Find in each slice the first entry that is not below a threshold.

    Args:
        times: Ascending within every slice, [N].
        begin: First entry of each slice, [Q].
        end: End of each slice, [Q].
        threshold: What to look for, [Q].

    Returns:
        Index into `times`, in [begin, end]; end where all entries are below, [Q].
    """
    low, high = begin.copy(), end.copy()
    if not len(times):
        return low
    for _ in range(int((end - begin).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        # An exhausted slice (low == high) may point past the end; clipped, and kept as it is.
        below = (times[np.minimum(middle, len(times) - 1)] < threshold) & (low < high)
        low = np.where(below, middle + 1, low)
        high = np.where(below, high, middle)
    return low


def lay_out(
    history_time: Longs, history_starts: Longs, target_time: Longs, target_starts: Longs, limits: Limits
) -> Layout:
    """Cut users into segments and give every token its interval.

    A target sees the newest `max_history` of the history strictly before its time, no older than `max_age_us` and W; a
    history token sees the earlier history of the segment, no older than W. A segment's history is exactly what its
    targets see. A target opens a new segment where its history begins at or past the end of what the target before it
    saw, after `max_targets`, and before the segment would exceed `token_budget`.

    Args:
        history_time: When each history token became visible (us), ascending within a user, [N].
        history_starts: Boundaries of the users in `history_time`, [U + 1].
        target_time: shown_at of each target (us), ascending within a user, [M].
        target_starts: Boundaries of the users in `target_time`, [U + 1].
        limits: The limits.

    Returns:
        The layout; every target stands in exactly one segment.
    """
    num_targets = len(target_time)
    target_user = np.repeat(np.arange(len(target_starts) - 1), np.diff(target_starts))
    begin, end = history_starts[:-1][target_user], history_starts[1:][target_user]
    hi = first_not_before(history_time, begin, end, target_time)
    lo = np.maximum(begin, hi - limits.max_history)
    reach = limits.max_age_us
    if limits.time_window_us is not None:
        reach = min(reach, limits.time_window_us)
    lo = first_not_before(history_time, lo, hi, target_time - reach)

    first = _segment_starts(lo, hi, target_starts, limits)
    last = np.append(first, num_targets)[1:] - 1
    num_history, count = hi[last] - lo[first], last - first + 1
    lengths = num_history + count
    segment = np.repeat(np.arange(len(first)), lengths)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target = within >= num_history[segment]
    begin_of = lo[first][segment]
    source = np.where(is_target, first[segment] + within - num_history[segment], begin_of + within)

    # Absolute first, then counted from the segment's first history token.
    targets = source[is_target]
    token_lo, token_hi = begin_of.copy(), begin_of + within
    token_lo[is_target], token_hi[is_target] = lo[targets], hi[targets]
    if limits.time_window_us is not None:
        history = source[~is_target]
        token_lo[~is_target] = first_not_before(
            history_time, begin_of[~is_target], history, history_time[history] - limits.time_window_us
        )
    relative_hi = (token_hi - begin_of).astype(np.int32)
    return Layout(
        user=target_user[first],
        lengths=lengths,
        num_targets=count,
        is_target=is_target,
        source=source,
        position=relative_hi,
        lo=(token_lo - begin_of).astype(np.int32),
        hi=relative_hi,
    )


def _segment_starts(lo: Longs, hi: Longs, target_starts: Longs, limits: Limits) -> Longs:
    """Return the first target of every segment; Python runs once a segment, not once a token."""
    total = len(lo)
    number = np.arange(total)
    opens = np.zeros(total + 1, dtype=np.bool_)
    opens[target_starts] = True
    # A target before which nothing was seen shares nothing either, but leaves no gap to the next one's history.
    opens[1:total] |= (lo[1:] > hi[:-1]) | ((lo[1:] == hi[:-1]) & (hi[:-1] > lo[:-1]))
    run_end = np.append(np.flatnonzero(opens[:total]), total)[np.cumsum(opens[:total])]
    after = np.minimum(number + limits.max_targets, run_end)
    # Tokens of targets f..l: (hi[l] - lo[f]) + (l - f + 1), so hi[l] + l decides, and it rises with l.
    used, most = hi + number, lo + number + (limits.token_budget - 1)
    over = np.flatnonzero(used[after - 1] > most)
    after[over] = first_not_before(used, number[over], after[over], most[over] + 1)
    following: list[int] = after.tolist()
    first, at = [], 0
    while at < total:
        first.append(at)
        at = following[at]
    return np.asarray(first, dtype=np.int64)


def starts_of(user: npt.NDArray[Any], num_users: int) -> Longs:
    """Return the boundaries [U + 1] of users in an ascending array of user numbers."""
    return np.searchsorted(user, np.arange(num_users + 1)).astype(np.int64)
