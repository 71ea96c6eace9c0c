"""Slices with vetoes: a challenger that is shown to be much worse on one slice is held, however good it is overall.

A slice vetoes only where the lower end of the gate's one-sided interval of NE(challenger) / NE(champion) - 1 lies above
`gate.slice_margin`, and it has `gate.slice_min_positives` positives: of slices that are worse by exactly the margin at most
1 - confidence hold, of equal ones far fewer, so many slices do not add up to many false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gr_core.config import GateConfig
from gr_core.eval.gate import Decision, Scores, compare
from gr_core.eval.metrics import ScoredRows
from gr_core.eval.slices import Slicing, parts

PASSED = ("gate passed", "first model")


def with_vetoes(
    decision: Decision,
    champion: ScoredRows | None,
    challenger: ScoredRows,
    slicings: Sequence[Slicing],
    config: GateConfig,
    *,
    bit: int,
    seed: int = 0,
) -> Decision:
    """Return the decision with what the slices say of it.

    Args:
        decision: The gate's, on all rows.
        champion: The champion's scores of the same rows in the same order; None where there is none, and nothing to veto.
        challenger: The challenger's; N rows.
        slicings: How the rows are parted.
        config: Action, slice margin, positives, confidence.
        bit: Bit number of the gate's action.
        seed: Of the bootstrap.

    Returns:
        The decision: held, with a reason a veto, where there is one; its figures tell of every slice.
    """
    if champion is None or champion.digest != challenger.digest or not slicings:
        return decision
    ours, theirs = Scores.of(challenger, bit), Scores.of(champion, bit)
    if not (np.isfinite(ours.logits).all() and np.isfinite(theirs.logits).all()):
        return decision
    told = _compared(theirs, ours, _known(slicings, challenger, bit), config, seed)
    vetoes = [_reason(one, config) for one in told if one["verdict"] == "veto"]
    figures = {**decision.figures, "slice_margin": config.slice_margin, "slices": told}
    if not vetoes:
        return Decision(decision.promote, decision.reasons, figures)
    return Decision(False, [reason for reason in decision.reasons if reason not in PASSED] + vetoes, figures)


def _known(slicings: Sequence[Slicing], scored: ScoredRows, bit: int) -> list[Slicing]:
    """Return the slicings of the rows where the action is known, as `Scores.of` takes them."""
    rows = np.flatnonzero(np.asarray(scored.label_known) >> bit & 1)
    return [Slicing(one.name, one.labels, np.asarray(one.place)[rows], one.veto) for one in slicings]


def _compared(
    champion: Scores, challenger: Scores, slicings: Sequence[Slicing], config: GateConfig, seed: int
) -> list[dict[str, Any]]:
    """Compare the two on every slice.

    Returns:
        slice, count, positives, users, difference, lower, upper (null where there is too little to compare), and verdict:
        passed | veto | reported (it may not veto) | insufficient_data.
    """
    _, users = np.unique(np.asarray(challenger.users, dtype=str), return_inverse=True)
    found = []
    for name, rows, may_veto in parts(slicings):
        labels = challenger.labels[rows]
        count, positives = len(rows), int(np.count_nonzero(labels))
        one: dict[str, Any] = {"slice": name, "count": count, "positives": positives}
        one |= {"users": len(np.unique(users[rows])), "difference": None, "lower": None, "upper": None}
        if positives < config.slice_min_positives or positives == count:
            found.append({**one, "verdict": "insufficient_data"})
            continue
        theirs, ours = (
            Scores(side.logits[rows], labels, users[rows].tolist(), side.digest) for side in (champion, challenger)
        )
        made = compare(theirs, ours, config.confidence, config.num_resamples, seed)
        is_worse = made.lower > config.slice_margin
        verdict = "veto" if is_worse and may_veto else "passed" if may_veto else "reported"
        ends = {"lower": _finite(made.lower), "upper": _finite(made.upper)}
        found.append({**one, "difference": made.difference, **ends, "verdict": verdict})
    return found


def _reason(one: dict[str, Any], config: GateConfig) -> str:
    return (
        f"gate.slice.{config.action}.{one['slice']}: NE {one['difference']:+.3f} relative, lower bound {one['lower']:+.3f}, "
        f"margin {config.slice_margin:+.3f}, {one['positives']} positives in {one['count']} rows of {one['users']} users"
    )


def _finite(value: float) -> float | None:
    """Return None for the open end of an interval over a single user."""
    return value if math.isfinite(value) else None
