"""Two models on the same rows: the metrics of both, their differences, and paired intervals of NE and AUC. Pure.

`delta` is b - a. The interval is the one that the gate computes: a bootstrap over users of NE(b) / NE(a) - 1, both models
on the same draw, here with both ends, each one-sided at `gate.confidence`. On one set of rows NE and log loss have the
same ratio, so `low` and `high` are that interval times a's own value. AUC's are its delta and that one's standard error over
users (gr_core.eval.spread), normal, at the same confidence; other metrics have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from gr_core.config import GateConfig
from gr_core.eval import gate as gates
from gr_core.eval.metrics import Array, ScoredRows, binary_metrics, gauc, supervised_bits
from gr_core.eval.slices import GAUC, Slicing, parts
from gr_core.eval.spread import auc_difference_error

RATIOS = ("ne", "log_loss")
"""Metrics that the interval belongs to."""
COUNTS = ("count", "positives", "non_finite")
_SLICED = ("auc", "ne", "calibration", *GAUC)

Paired = dict[str, float | int | None]


def beside(a: float | None, b: float | None, *, same_rows: bool = True) -> Paired:
    """Return {"a", "b", "delta", "low", "high"} without an interval; without a delta where the rows are not the same."""
    told = same_rows and a is not None and b is not None
    return {
        "a": a,
        "b": b,
        "delta": b - a if told and a is not None and b is not None else None,
        "low": None,
        "high": None,
    }


def pair(
    a: ScoredRows,
    b: ScoredRows,
    action_names: Sequence[str],
    supervised: int,
    config: GateConfig,
    *,
    seed: int = 0,
    rows: Array | None = None,
) -> dict[str, dict[str, Paired]]:
    """Compare two models' scores of the same rows, action by action.

    Args:
        a: One model's scores.
        b: The other's, with the same digest.
        action_names: All actions in bit order.
        supervised: Mask of those that are compared.
        config: Confidence and number of resamples.
        seed: Of the draws.
        rows: Numbers of the rows to compare; None: all.

    Returns:
        {action: {metric: {"a", "b", "delta", "low", "high"}}}; counts have the same a and b.

    Raises:
        ValueError: The rows are not the same.
    """
    if a.digest != b.digest:
        raise ValueError(f"only equal rows are paired, got row digests {a.digest!r} and {b.digest!r}")
    chosen = np.arange(len(a.labels)) if rows is None else rows
    found = {}
    for action, bit in supervised_bits(action_names, supervised).items():
        known = chosen[(np.asarray(a.label_known)[chosen] >> bit & 1) == 1]
        labels, users = np.asarray(a.labels)[known] >> bit & 1, [a.users[row] for row in known.tolist()]
        ours, theirs = (
            gates.Scores(np.asarray(one.logits)[known, list(one.action_bits).index(bit)], labels, users, one.digest)
            for one in (a, b)
        )
        found[action] = _paired(ours, theirs, config, seed)
    return found


def _paired(a: gates.Scores, b: gates.Scores, config: GateConfig, seed: int) -> dict[str, Paired]:
    ours, theirs = (_measured(one) for one in (a, b))
    found = {key: beside(ours.get(key), theirs.get(key)) for key in dict.fromkeys([*ours, *theirs])}
    if ours["log_loss"] is None or theirs["log_loss"] is None or not ours["log_loss"] > 0:
        return found
    error, delta = auc_difference_error(a.labels, a.logits, b.logits, a.users), found["auc"]["delta"]
    if error is not None and delta is not None:
        reach = NormalDist().inv_cdf(config.confidence) * error
        found["auc"] |= {"low": delta - reach, "high": delta + reach}
    made = gates.compare(a, b, config.confidence, config.num_resamples, seed)
    for key in RATIOS:
        value = ours[key]
        if value is not None:
            found[key] |= {"low": _finite(value * made.lower), "high": _finite(value * made.upper)}
    return found


def _measured(one: gates.Scores) -> dict[str, float | int | None]:
    found = binary_metrics(one.labels, one.logits)
    within = {} if "non_finite" in found else gauc(one.labels, one.logits, one.users)
    return found | {key: within.get(key) for key in GAUC}


def _finite(value: float) -> float | None:
    """Return None for the open end of an interval over a single user."""
    return value if math.isfinite(value) else None


def flat(role: str, found: Mapping[str, Mapping[str, Paired]]) -> dict[str, Paired]:
    """Return {"<role>/<metric>/<action>": ...}, keys as MLflow has them."""
    return {f"{role}/{key}/{action}": value for action, values in found.items() for key, value in values.items()}


def by_slice(
    a: ScoredRows,
    b: ScoredRows,
    action_names: Sequence[str],
    supervised: int,
    config: GateConfig,
    slicings: Sequence[Slicing],
    *,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare two models on the events of each slice.

    Args:
        a: One model's scores; N rows.
        b: The other's, with the same digest.
        action_names: All actions in bit order.
        supervised: Mask of those that are compared.
        config: Confidence and number of resamples.
        slicings: How the rows are parted, each with N places.
        seed: Of the draws.

    Returns:
        [{"slice": "surface=feed", "key", "a", "b", "delta", "low", "high", "count"}] of the slices that have rows, in order.
    """
    found = []
    for name, rows, _ in parts(slicings):
        made = pair(a, b, action_names, supervised, config, seed=seed, rows=rows)
        for action, values in made.items():
            count = values["count"]["a"]
            if count:
                found += [
                    {"slice": name, "key": f"holdout/{key}/{action}", **values[key], "count": count} for key in _SLICED
                ]
    return found
