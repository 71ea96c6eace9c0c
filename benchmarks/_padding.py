"""What padding wastes by layout and grouping, on the lengths of the report's two products.

In: a preset. Out: rows of the table. Lengths are lognormal and cut at the longest, such that 64 random users padded to the
longest of them waste what the report gives: 87 % on `ads`, 75 % on `feed`. Batches are planned by the product's planner.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gr_core.data.planning import PlanRules, plan

LAYOUTS = ("padded", "packed")
GROUPINGS = ("none", "bucketed", "sorted")
RANDOM_USERS = 64
"""Users of a padded batch of fixed size, as the report counts its padding."""

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long segments are, tokens."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int
    """Longer ones are cut."""


PRESETS = {
    "ads": Lengths(median=40, sigma=1.1, longest=1024),
    "feed": Lengths(median=87, sigma=0.9, longest=512),
    "long": Lengths(median=250, sigma=1.0, longest=1000),
}


def lengths_of(preset: str, num_segments: int, seed: int = 0) -> Longs:
    """Return the tokens of so many segments, one a user, [S]."""
    shape = PRESETS[preset]
    drawn = shape.median * np.exp(np.random.default_rng(seed).normal(0, shape.sigma, num_segments))
    return np.clip(np.round(drawn), 1, shape.longest).astype(np.int64)


def padding_table(
    preset: str, *, num_segments: int = 50_000, token_budget: int = 8192, seed: int = 0
) -> list[dict[str, Any]]:
    """Return what each layout and grouping wastes.

    Args:
        preset: A key of PRESETS.
        num_segments: How many segments.
        token_budget: Of a batch; tokens that are padding count, too.
        seed: Of the lengths and the shuffle.

    Returns:
        Rows of layout, grouping, batches, padding_fraction (of the tokens computed) and wasted_fraction (of the budget
        of all batches). The first row is RANDOM_USERS random users a batch, each padded to the longest of them, whose
        budget is the tokens computed.
    """
    lengths = lengths_of(preset, num_segments, seed)
    fixed = np.arange(0, num_segments + 1, RANDOM_USERS)
    computed = _padded(lengths[: fixed[-1]], fixed)
    padding = 1 - int(lengths[: fixed[-1]].sum()) / computed
    rows: list[dict[str, Any]] = [_row(f"padded, {RANDOM_USERS} users", "none", len(fixed) - 1, padding, padding)]
    for layout, grouping in itertools.product(LAYOUTS, GROUPINGS):
        rules = PlanRules(token_budget=token_budget, layout=layout, grouping=grouping, seed=seed)  # type: ignore[arg-type]
        order, cuts = plan(lengths, np.arange(num_segments), rules)
        computed = _padded(lengths[order], cuts) if layout == "padded" else int(lengths.sum())
        batches, total = len(cuts) - 1, int(lengths.sum())
        rows.append(_row(layout, grouping, batches, 1 - total / computed, 1 - total / (batches * token_budget)))
    return rows


def _padded(lengths: Longs, cuts: Longs) -> int:
    """Return the tokens of batches whose segments are padded to the longest of the batch."""
    return int((np.maximum.reduceat(lengths, cuts[:-1]) * np.diff(cuts)).sum())


def _row(layout: str, grouping: str, batches: int, padding: float, wasted: float) -> dict[str, Any]:
    return {
        "layout": layout,
        "grouping": grouping,
        "batches": batches,
        "padding_fraction": round(padding, 4),
        "wasted_fraction": round(wasted, 4),
    }
