"""Which segments share a batch: numpy only, Python runs once a batch.

In: lengths and users of the segments. Out: their order in the pack and the batch boundaries. The order is a shuffle; a
batch takes its segments from the front of what is left, then fills the rest of the budget with the longest that fit
among the next LOOKAHEAD, so that little of the budget is unused and no segment comes much before its turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

LOOKAHEAD = 256
"""Segments behind the front of the shuffle that may fill a batch's rest."""

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """What a batch may hold and in which order batches come."""

    token_budget: int
    """Most tokens of a batch; no segment is longer."""
    layout: Literal["packed", "padded"] = "packed"
    """padded: a batch holds at most token_budget tokens after every segment is padded to the longest."""
    grouping: Literal["none", "sorted", "bucketed"] = "none"
    """sorted: batches of like lengths; bucketed: lengths within a factor of two."""
    seed: int = 0
    """Of the shuffle."""
    shuffle_batches: bool = True
    """With a grouping: whether batches come in random order, too."""


def plan(lengths: Longs, user_rank: npt.NDArray[Any], rules: PlanRules) -> tuple[Longs, Longs]:
    """Choose the order of segments and the batch boundaries.

    No batch exceeds the budget or holds two segments of one user. The result depends on the users' order and the order
    of each user's own segments alone, so the cut into buckets cannot show.

    Args:
        lengths: Tokens of each segment, [S].
        user_rank: Place of each segment's user among all users, [S].
        rules: The rules.

    Returns:
        order [S]: segment numbers in pack order; batch_segments [B + 1]: boundaries in it.
    """
    canonical = np.argsort(user_rank, kind="stable")
    rng = np.random.default_rng(rules.seed)
    order = canonical[rng.permutation(len(canonical))]
    if rules.grouping != "none":
        key = lengths[order]
        if rules.grouping == "bucketed":
            key = np.ceil(np.log2(np.maximum(key, 1)))
        order = order[np.argsort(key, kind="stable")]
    batches = _fill(lengths[order], user_rank[order], rules)
    if rules.grouping != "none" and rules.shuffle_batches:
        # Only what a batch holds follows the lengths, never when it comes.
        batches = [batches[i] for i in rng.permutation(len(batches))]
    picked = np.concatenate([np.zeros(0, np.int64), *batches])
    boundaries = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
    return order[picked], boundaries


def _fill(lengths: Longs, user: npt.NDArray[Any], rules: PlanRules) -> list[Longs]:
    """Return the segments of each batch, as places in the given order."""
    total, budget = len(lengths), rules.token_budget
    ends = np.cumsum(lengths)
    repeated = _repeated(user)
    batches: list[Longs] = []
    waiting, at = np.zeros(0, np.int64), 0
    while at < total or len(waiting):
        # Enough for the budget whatever waits, and LOOKAHEAD more.
        reach = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + budget, side="right")) + LOOKAHEAD
        window = np.append(waiting, np.arange(at, min(reach, total)))
        batch, seen = _one_batch(lengths[window], user[window] if repeated[window].any() else None, rules)
        taken = np.zeros(len(window), np.bool_)
        taken[batch] = True
        batches.append(window[batch])
        # What was passed over comes first next time; what was not reached is not waiting.
        at = max(at, int(window[seen - 1]) + 1)
        left = window[~taken]
        waiting = left[left < at]
    return batches


def _repeated(user: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tell for each segment whether its user has another one."""
    return np.asarray(np.bincount(user, minlength=1)[user] > 1)


def _one_batch(lengths: Longs, user: npt.NDArray[Any] | None, rules: PlanRules) -> tuple[Longs, int]:
    """Choose a batch from a window.

    Returns:
        The chosen places of the window; how many of its first places were looked at and may be waiting from now on.
    """
    place = np.arange(len(lengths))
    if user is not None:
        place = np.sort(np.unique(user, return_index=True)[1])
        lengths = lengths[place]
    if rules.layout == "padded":
        longest = np.maximum.accumulate(lengths)
        count = int(np.searchsorted(longest * np.arange(1, len(lengths) + 1), rules.token_budget, side="right"))
        most = int(longest[count - 1])
        behind = np.flatnonzero(lengths[count : count + LOOKAHEAD] <= most)
        more = count + behind[: rules.token_budget // most - count]
    else:
        used = np.cumsum(lengths)
        count = int(np.searchsorted(used, rules.token_budget, side="right"))
        more = count + _fitting(lengths[count : count + LOOKAHEAD], rules.token_budget - int(used[count - 1]))
    chosen = np.append(np.arange(count), more)
    return place[chosen], int(place[chosen.max()]) + 1


def _fitting(lengths: Longs, room: int) -> Longs:
    """Return places of segments that fill a rest: again and again the first of the longest that still fit."""
    found: list[int] = []
    left = lengths.copy()
    while len(left):
        best = int(np.argmax(np.where(left <= room, left, -1)))
        if left[best] > room:
            break
        found.append(best)
        room -= int(left[best])
        left[best] = np.iinfo(np.int64).max
    return np.asarray(found, dtype=np.int64)
