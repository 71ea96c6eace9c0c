"""Segments and attention intervals from times alone: one linear pass, numpy only, no Python per token.

In: the times of each user's history and targets. Out: a `Cut` (segments, and what each target sees), or a `Layout`, which
says for every token of every segment where it comes from and which keys [lo, hi) it may attend to. sequences.py and
ready_packs.py share it, so that a pack written without Polars follows the same rules (design section 4, "Sequences" and
"Tokens"; example 2).
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
    entry_tokens: int = 1
    """Most tokens that a history token of the limits above becomes in a pack (gr_core.data.interleaved: 2)."""

    def __post_init__(self) -> None:
        """Check that one target with its history fits."""
        if self.max_history < 1 or self.max_targets < 1:
            raise ValueError(
                f"max_history and max_targets must be at least 1, got {self.max_history} and {self.max_targets}"
            )
        need = self.entry_tokens * self.max_history + 1
        if self.token_budget < need:
            times = f"{self.entry_tokens} * " if self.entry_tokens > 1 else ""
            raise ValueError(f"token_budget must be at least {times}max_history + 1 = {need}, got {self.token_budget}")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Which targets make a segment and what each sees, before any token is written out. S segments, M targets."""

    first: Longs
    """First target of each segment, [S], ascending; a segment ends where the next one begins."""
    lo: Longs
    """First history row that each target sees, [M]; non-decreasing within a user."""
    hi: Longs
    """End of the history rows, [M], likewise."""

    @property
    def num_targets(self) -> Longs:
        """Targets of each segment, [S]."""
        return np.diff(self.first, append=len(self.lo))

    @property
    def begin(self) -> Longs:
        """First history row of each segment, [S]."""
        first: Longs = self.lo[self.first]
        return first

    @property
    def num_history(self) -> Longs:
        """History rows of each segment, [S]: exactly what its targets see."""
        ends: Longs = self.hi[self.first + self.num_targets - 1]
        return ends - self.begin


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
    found = begin.copy()
    if not len(times):
        return found
    # Most slices begin at or past the threshold (a limit that does not bite): only the others are searched.
    asked = np.flatnonzero((begin < end) & (times[np.minimum(begin, len(times) - 1)] < threshold))
    low, high, least = begin[asked] + 1, end[asked], threshold[asked]
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        # An exhausted slice (low == high) may point past the end; clipped, and kept as it is.
        below = (times[np.minimum(middle, len(times) - 1)] < least) & (low < high)
        low = np.where(below, middle + 1, low)
        high = np.where(below, high, middle)
    found[asked] = low
    return found


def cut(
    history_time: Longs,
    history_starts: Longs,
    target_time: Longs,
    target_starts: Longs,
    limits: Limits,
    visible: Longs | None = None,
) -> Cut:
    """Cut users into segments and find what every target sees.

    A target sees the newest `max_history` of the history strictly before its time, no older than `max_age_us` and W. A
    target opens a new segment where its history begins at or past the end of what the target before it saw, after
    `max_targets`, and before the segment would exceed `token_budget`.

    Args:
        history_time: When each history token became visible (us), ascending within a user, [N].
        history_starts: Boundaries of the users in `history_time`, [U + 1].
        target_time: shown_at of each target (us), ascending within a user, [M].
        target_starts: Boundaries of the users in `target_time`, [U + 1].
        limits: The limits.
        visible: For each target the end of its user's history before its time, [M]; None: searched for here.

    Returns:
        The cut; every target stands in exactly one segment.
    """
    target_user = np.repeat(np.arange(len(target_starts) - 1), np.diff(target_starts))
    begin = history_starts[:-1][target_user]
    hi = visible
    if hi is None:
        hi = first_not_before(history_time, begin, history_starts[1:][target_user], target_time)
    lo = np.maximum(begin, hi - limits.max_history)
    reach = limits.max_age_us
    if limits.time_window_us is not None:
        reach = min(reach, limits.time_window_us)
    lo = first_not_before(history_time, lo, hi, target_time - reach)
    return Cut(first=_segment_starts(lo, hi, target_starts, limits), lo=lo, hi=hi)


def lay_out(
    history_time: Longs, history_starts: Longs, target_time: Longs, target_starts: Longs, limits: Limits
) -> Layout:
    """Cut users into segments and give every token its interval.

    Targets see what `cut` says; a history token sees the earlier history of the segment, no older than W.

    Args:
        history_time: When each history token became visible (us), ascending within a user, [N].
        history_starts: Boundaries of the users in `history_time`, [U + 1].
        target_time: shown_at of each target (us), ascending within a user, [M].
        target_starts: Boundaries of the users in `target_time`, [U + 1].
        limits: The limits.

    Returns:
        The layout; every target stands in exactly one segment.
    """
    made = cut(history_time, history_starts, target_time, target_starts, limits)
    first, count, num_history = made.first, made.num_targets, made.num_history
    lengths = num_history + count
    segment = np.repeat(np.arange(len(first)), lengths)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target = within >= num_history[segment]
    begin_of = made.begin[segment]
    source = np.where(is_target, first[segment] + within - num_history[segment], begin_of + within)

    # Absolute first, then counted from the segment's first history token.
    targets = source[is_target]
    token_lo, token_hi = begin_of.copy(), begin_of + within
    token_lo[is_target], token_hi[is_target] = made.lo[targets], made.hi[targets]
    if limits.time_window_us is not None:
        history = source[~is_target]
        token_lo[~is_target] = first_not_before(
            history_time, begin_of[~is_target], history, history_time[history] - limits.time_window_us
        )
    relative_hi = (token_hi - begin_of).astype(np.int32)
    return Layout(
        user=np.searchsorted(target_starts, first, side="right") - 1,
        lengths=lengths,
        num_targets=count,
        is_target=is_target,
        source=source,
        position=relative_hi,
        lo=(token_lo - begin_of).astype(np.int32),
        hi=relative_hi,
    )


def _segment_starts(lo: Longs, hi: Longs, target_starts: Longs, limits: Limits) -> Longs:
    """Return the first target of every segment; Python runs once for the longest chain of segments."""
    total = len(lo)
    if not total:
        return np.zeros(0, dtype=np.int64)
    opens = np.zeros(total, dtype=np.bool_)
    opens[target_starts[:-1][np.diff(target_starts) > 0]] = True
    # A target before which nothing was seen shares nothing either, but leaves no gap to the next one's history.
    opens[1:] |= (lo[1:] > hi[:-1]) | ((lo[1:] == hi[:-1]) & (hi[:-1] > lo[:-1]))
    runs = np.flatnonzero(opens)
    ends = np.append(runs, total)[1:]
    found, at = [runs], runs
    # All runs take a step at a time: most end with their first one.
    while len(at):
        at = _next_start(at, ends, lo, hi, limits)
        more = at < ends
        at, ends = at[more], ends[more]
        found.append(at)
    return np.sort(np.concatenate(found))


def _next_start(at: Longs, ends: Longs, lo: Longs, hi: Longs, limits: Limits) -> Longs:
    """Return where the segments that begin at targets `at` end, at most at the run's end, [Q]."""
    after = np.minimum(at + limits.max_targets, ends)
    # Tokens of targets f..l: k (hi[l] - lo[f]) + (l - f + 1), so k hi[l] + l decides, and it rises with l.
    k = limits.entry_tokens
    most = k * lo[at] + at + (limits.token_budget - 1)
    over = np.flatnonzero(k * hi[after - 1] + after - 1 > most)
    low, high = at[over] + 1, after[over] - 1
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        fits = (k * hi[middle] + middle <= most[over]) & (low < high)
        low = np.where(fits, middle + 1, low)
        high = np.where(fits, high, middle)
    after[over] = low
    return after


def starts_of(user: npt.NDArray[Any], num_users: int) -> Longs:
    """Return the boundaries [U + 1] of users in an ascending array of user numbers."""
    return np.searchsorted(user, np.arange(num_users + 1)).astype(np.int64)
