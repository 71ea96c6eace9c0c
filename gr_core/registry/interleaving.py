"""Requests as interleaved tokens: the same functions as packs, from the entries that a request gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gr_core.data.interleaved import Entries, columns_of, interleave
from gr_core.data.intervals import Layout, Longs, first_not_before

LATE = np.iinfo(np.int64).min
"""shown_at of a late action's entry."""


def interleaved(
    plan: Layout,
    columns: dict[str, npt.NDArray[Any]],
    shown: Longs,
    window_us: int | None,
    features: Sequence[str],
) -> tuple[dict[str, npt.NDArray[Any]], Longs]:
    """Return the columns of requests' segments as interleaved tokens, and the segments' lengths.

    Args:
        plan: The segments, one a request: its visible entries, then its candidates.
        columns: Their columns as `targets` has them, lo and hi counted from the segment, [B].
        shown: shown_at of each row's event, us; LATE: a late action, [B].
        window_us: The time window; None: none.
        features: Feature columns.
    """
    entries = plan.lengths - plan.num_targets
    starts = np.cumsum(plan.lengths) - plan.lengths
    segment = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    within = np.arange(len(segment)) - starts[segment]
    begin, end = starts[segment], (starts + entries)[segment]
    # Targets follow a segment's entries with times of their own, beyond `end`.
    seen = first_not_before(columns["time"], begin, end, shown) - begin
    first = np.zeros_like(seen)
    if window_us is not None:
        oldest = np.where(shown == LATE, LATE, shown - window_us)
        first = first_not_before(columns["time"], begin, end, oldest) - begin
    made = interleave(
        Entries(
            pieces=np.stack([entries, plan.num_targets], axis=1),
            is_target=plan.is_target,
            late=(shown == LATE) & ~plan.is_target,
            place=within,
            first=np.where(plan.is_target, columns["lo"], first),
            seen=np.where(plan.is_target, columns["hi"], seen),
            since=columns["lo"].astype(np.int64),
        )
    )
    return columns_of(made, columns, shown, features), made.lengths
