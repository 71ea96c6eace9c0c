"""The next-night check: was the champion right to take over? Two models' scores in, a verdict out; no storage.

A night's new events, of all users, are the first that neither the champion nor the one before it was trained on. Both are
scored on them, and the champion is worse when the lower end of the interval of NE(champion) / NE(previous) - 1, the gate's
paired bootstrap over users, lies above the margin: a loss that chance explains moves nothing. N is the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gr_core.config import GateConfig
from gr_core.eval import gate as gates
from gr_core.eval.metrics import ScoredRows, auc, calibration, normalized_entropy
from gr_core.next_night_config import NextNightConfig


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found."""

    worse: bool
    """The champion is worse than the previous one beyond the margin, or its scores are not finite."""
    reason: str
    """Why, or why not."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What it was found on: counts, NEs, difference, interval, row digest (JSON values, null where undefined)."""


def untrained(
    scored: ScoredRows, bit: int, action: str, newest: Sequence[Mapping[str, int]]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows neither model can have been trained on for an action: shown after all that either has seen.

    Args:
        scored: The new events, scored.
        bit: The action's.
        action: The action.
        newest: Of each model: action -> newest shown_at that its lineage was supervised on (us).

    Returns:
        Boolean [N]; none where a model was never supervised on the action, since its scores mean nothing.
    """
    known = (np.asarray(scored.label_known) >> bit & 1) == 1
    if any(action not in one for one in newest):
        return np.zeros_like(known)
    return np.asarray(known & (np.asarray(scored.time) > max(one[action] for one in newest)))


def judge(
    champion: gates.Scores, previous: gates.Scores, config: NextNightConfig, gate: GateConfig, *, seed: int = 0
) -> Verdict:
    """Compare the champion with the one before it on the same rows.

    Args:
        champion: Its scores of the rows that neither was trained on.
        previous: The other's, of the same rows.
        config: Margin, confidence, how much is enough.
        gate: The action's name and the number of resamples.
        seed: Of the bootstrap.
    """
    figures = _figures(champion, previous, config, gate)
    if champion.digest != previous.digest or len(champion.labels) != len(previous.labels):
        return Verdict(False, "not checked: the two were scored on different rows", figures)
    positives, count = figures["positives"], figures["count"]
    if positives < config.min_positives or positives == count:
        few = f"{positives} positives of {gate.action} in {count} new events that neither was trained on"
        return Verdict(False, f"not checked: {few}, next_night.min_positives {config.min_positives}", figures)
    if not np.isfinite(previous.logits).all():
        return Verdict(False, "not checked: the previous champion's scores are not finite", figures)
    if not np.isfinite(champion.logits).all():
        return Verdict(True, "the champion's scores are not finite", figures)
    found = gates.compare(previous, champion, config.confidence, gate.num_resamples, seed)
    figures |= {
        "difference": found.difference,
        "standard_error": found.standard_error,
        "lower_bound": _finite(found.lower),
        "upper_bound": _finite(found.upper),
    }
    told = (
        f"NE of {gate.action} {found.difference:+.3f} relative to the previous champion's on {count} new events of "
        f"{figures['users']} users, lower bound {found.lower:+.3f}, margin {config.margin:+.3f}"
    )
    return Verdict(found.lower > config.margin, told, figures)


def _figures(
    champion: gates.Scores, previous: gates.Scores, config: NextNightConfig, gate: GateConfig
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "action": gate.action,
        "count": len(champion.labels),
        "positives": int(np.count_nonzero(champion.labels)),
        "users": len(set(champion.users)),
        "rows_champion": champion.digest,
        "rows_previous": previous.digest,
        "margin": config.margin,
        "confidence": config.confidence,
    }
    for name, scores in (("champion", champion), ("previous", previous)):
        usable = len(scores.labels) > 0 and np.isfinite(scores.logits).all()
        for key, metric in (("ne", normalized_entropy), ("auc", auc), ("calibration", calibration)):
            figures[f"{key}_{name}"] = metric(scores.labels, scores.logits) if usable else None
    return figures


def _finite(value: float) -> float | None:
    """Return None for the open end of an interval over a single user."""
    return value if math.isfinite(value) else None


def told(checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the journal and `status` keep of a night's check: champion, previous, worse, rolled_back, reason, figures."""
    return {key: checked[key] for key in ("champion", "previous", "worse", "rolled_back", "reason", "figures")}


def metric_keys(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return stable flat keys for MLflow: next_night/<figure>/<action>; empty where nothing was compared."""
    figures = (result or {}).get("figures") or {}
    numbers = ("ne_champion", "ne_previous", "difference", "lower_bound", "upper_bound", "count", "positives")
    found = {f"next_night/{key}/{figures['action']}": figures.get(key) for key in numbers if figures.get("action")}
    return found | ({"next_night/worse": bool(result and result["worse"])} if figures else {})
