"""The gate: values in, a Decision out. Promote a challenger that is shown not to be worse than the champion.

Both are scored on identical rows that neither trained on (holdout users). Promote iff the one-sided upper confidence
bound of NE(challenger) / NE(champion) - 1 is below the margin, and every other check passes; the same bound against
the last full retrain must be below the cumulative margin. The bound is a paired bootstrap over users: a user's events
stand or fall together. On the same rows base rate and count cancel, so the
ratio of NEs is the ratio of summed log losses, and a resample is one weighted sum over users. N is the number of
rows, U of users, R of resamples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from statistics import NormalDist
from typing import Any

import numpy as np

from gr_core.config import GateConfig
from gr_core.eval.metrics import Array, ScoredRows, auc, calibration, losses, normalized_entropy

# Above this many users they are drawn in groups: groups of independent users are independent too, so the bound
# stays valid, and 1000 resamples take 0.2 s however many users there are.
_MAX_UNITS = 8192
_CHUNK_CELLS = 500_000


@dataclass(frozen=True, slots=True)
class Scores:
    """One model's scores for the gate's action on the rows where the action is known."""

    logits: Array
    """float32 [N]."""
    labels: Array
    """0 or 1 [N]."""
    users: Sequence[str]
    """User of each row [N]."""
    digest: str
    """Of the row set; two models were judged on the same rows exactly when it is equal."""

    @classmethod
    def of(cls, scored: ScoredRows, bit: int) -> Scores:
        """Take the rows of a scored pack where action `bit` is known, in pack order."""
        rows = np.flatnonzero(np.asarray(scored.label_known) >> bit & 1)
        users = [scored.users[row] for row in rows.tolist()]
        logits = np.asarray(scored.logits)[rows, list(scored.action_bits).index(bit)]
        return cls(logits, np.asarray(scored.labels)[rows] >> bit & 1, users, scored.digest)

    @classmethod
    def concat(cls, parts: Sequence[Scores]) -> Scores:
        """Join the scores of several packs; equal parts in equal order give equal digests."""
        joined = "\n".join(part.digest for part in parts)
        return cls(
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.labels for part in parts]),
            [user for part in parts for user in part.users],
            parts[0].digest if len(parts) == 1 else hashlib.sha256(joined.encode()).hexdigest(),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The gate's word."""

    promote: bool
    reasons: list[str]
    """Why; "gate passed" or "first model" where promoted, each failed check where held."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What it was decided on: counts, NEs, bound, standard error, row digest (JSON values, null where undefined)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A paired bootstrap of NE(challenger) / NE(champion) - 1; below 0 the challenger is better."""

    difference: float
    upper: float
    """Upper end of the one-sided interval."""
    standard_error: float
    lower: float = float("-inf")
    """Lower end of the one-sided interval to the other side."""


def decide(  # noqa: PLR0913 -- each is one input of the rule
    champion: Scores | None,
    challenger: Scores,
    config: GateConfig,
    *,
    data_ok: bool = True,
    challenger_date: Date | str,
    champion_date: Date | str | None = None,
    baseline: Array | None = None,
    full_retrain: Scores | None = None,
    seed: int = 0,
) -> Decision:
    """Decide whether the challenger becomes the champion.

    Args:
        champion: The champion's scores; None when there is none yet.
        challenger: The challenger's scores, on the same rows.
        config: Margin, confidence, bands and policy.
        data_ok: Whether the night's data checks are green.
        challenger_date: The challenger's data day.
        champion_date: The champion's data day.
        baseline: Probabilities of smoothed counts on the challenger's rows [N]; a first model must beat them.
            None: it must only beat the base rate (NE < 1).
        full_retrain: Scores of the last full retrain on the same rows, where the lineage has one.
        seed: Of the bootstrap; equal inputs and seed give an equal decision.

    Returns:
        The decision with every reason against it, or the reason for it.
    """
    action = config.action
    figures = _figures(champion, challenger, config)
    blockers = _blockers(champion, challenger, action, data_ok=data_ok)
    if champion is not None and champion_date is not None and str(challenger_date) <= str(champion_date):
        blockers.append(f"gate.date: data day {challenger_date} is not after the champion's {champion_date}")
    if blockers:
        return Decision(False, blockers, figures)
    shortage = _shortage(challenger, config)
    failed = _sanity(figures, config, needs_ne=champion is None or shortage is not None)
    if shortage:
        if config.insufficient_data == "hold" or failed:
            return Decision(False, [shortage, *failed], figures)
        return Decision(True, ["first model" if champion is None else "gate passed", shortage], figures)
    if champion is None:
        if baseline is not None:
            failed += _against_baseline(challenger, baseline, action, figures)
    else:
        failed += _against(champion, challenger, config, seed, figures)
    if full_retrain is not None:
        failed += _against_full(full_retrain, challenger, config, seed, figures)
    if failed:
        return Decision(False, failed, figures)
    return Decision(True, ["first model" if champion is None else "gate passed"], figures)


def held(decision: Decision, reasons: Sequence[str]) -> Decision:
    """Return a decision as it is, or where there are reasons that no figure outweighs, one that holds for them first."""
    if not reasons:
        return decision
    return Decision(False, [*reasons, *([] if decision.promote else decision.reasons)], decision.figures)


def _figures(champion: Scores | None, challenger: Scores, config: GateConfig) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "action": config.action,
        "count": len(challenger.labels),
        "positives": int(np.count_nonzero(challenger.labels)),
        "users": len(set(challenger.users)),
        "rows_challenger": challenger.digest,
        "rows_champion": champion.digest if champion else None,
        "margin": config.margin,
        "confidence": config.confidence,
    }
    for name, scores in (("challenger", challenger), ("champion", champion)):
        usable = scores is not None and np.isfinite(scores.logits).all()
        for key, metric in (("ne", normalized_entropy), ("auc", auc), ("calibration", calibration)):
            figures[f"{key}_{name}"] = metric(scores.labels, scores.logits) if scores is not None and usable else None
    return figures


def _blockers(champion: Scores | None, challenger: Scores, action: str, *, data_ok: bool) -> list[str]:
    """Return why the two cannot be compared at all; NaN never passes."""
    found = [] if data_ok else ["gate.data: the night's data checks are not green"]
    for name, scores in (("challenger", challenger), ("champion", champion)):
        bad = 0 if scores is None else int(np.count_nonzero(~np.isfinite(scores.logits)))
        if bad:
            found.append(f"gate.finite.{action}: {bad} of the {name}'s logits are not finite")
    if champion is not None and champion.digest != challenger.digest:
        found.append(
            f"gate.rows: champion and challenger were scored on different rows ({champion.digest[:12]} and "
            f"{challenger.digest[:12]})"
        )
    return found


def _shortage(scores: Scores, config: GateConfig) -> str | None:
    positives = int(np.count_nonzero(scores.labels))
    if positives < config.min_positives:
        return f"insufficient_data: {positives} positives of {config.action}, gate.min_positives {config.min_positives}"
    if positives == len(scores.labels):
        return f"insufficient_data: no negatives of {config.action} in {positives} rows"
    return None


def _sanity(figures: dict[str, Any], config: GateConfig, *, needs_ne: bool) -> list[str]:
    """Check calibration and, where nothing better is compared with, NE below the base rate's."""
    failed = []
    low, high = config.calibration
    value, ne = figures["calibration_challenger"], figures["ne_challenger"]
    if value is None or not low <= value <= high:
        shown = "undefined" if value is None else f"{value:.3f}"
        failed.append(f"gate.calibration.{config.action}: {shown}, band {low:g} to {high:g}")
    if needs_ne and (ne is None or not ne < 1):
        shown = "undefined" if ne is None else f"{ne:.4f}"
        failed.append(f"gate.ne.{config.action}: {shown}, must be below 1 (the base rate's)")
    return failed


def _against_baseline(challenger: Scores, baseline: Array, action: str, figures: dict[str, Any]) -> list[str]:
    if len(baseline) != len(challenger.labels):
        raise ValueError(f"baseline must have one probability a row, got {len(baseline)} for {len(challenger.labels)}")
    p = np.clip(np.asarray(baseline, np.float64), 1e-9, 1 - 1e-9)
    figures["ne_baseline"] = normalized_entropy(challenger.labels, np.log(p) - np.log1p(-p))
    ne, counts = figures["ne_challenger"], figures["ne_baseline"]
    if counts is not None and ne < counts:
        return []
    return [f"gate.baseline.{action}: NE {ne:.4f} is not below that of smoothed counts, {counts:.4f}"]


def _against(champion: Scores, challenger: Scores, config: GateConfig, seed: int, figures: dict[str, Any]) -> list[str]:
    result = compare(champion, challenger, config.confidence, config.num_resamples, seed)
    figures |= {
        "difference": result.difference,
        "upper_bound": result.upper,
        "standard_error": result.standard_error,
    }
    if result.upper < config.margin:
        return []
    return [f"gate.ne.{config.action}: upper bound {result.upper:+.3f} relative, margin {config.margin:+.3f}"]


def _against_full(
    full: Scores, challenger: Scores, config: GateConfig, seed: int, figures: dict[str, Any]
) -> list[str]:
    """Small losses, each within the margin, must not add up to more than the cumulative margin."""
    if full.digest != challenger.digest:
        return ["gate.rows: last full retrain and challenger were scored on different rows"]
    bad = int(np.count_nonzero(~np.isfinite(full.logits)))
    if bad:
        return [f"gate.finite.{config.action}: {bad} of the last full retrain's logits are not finite"]
    result = compare(full, challenger, config.confidence, config.num_resamples, seed)
    figures |= {
        "ne_full_retrain": normalized_entropy(full.labels, full.logits),
        "cumulative_difference": result.difference,
        "cumulative_lower_bound": result.lower,
        "cumulative_upper_bound": result.upper,
        "cumulative_margin": config.cumulative_margin,
    }
    if result.upper < config.cumulative_margin:
        return []
    return [
        f"gate.cumulative.{config.action}: upper bound {result.upper:+.3f} relative to the last full retrain, "
        f"gate.cumulative_margin {config.cumulative_margin:+.3f}"
    ]


def compare(
    champion: Scores, challenger: Scores, confidence: float, num_resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Bootstrap the relative NE difference over users, both models on the same draw.

    The upper end is the larger of the percentile and of the normal approximation with the resamples' standard
    error: with few users the percentile alone promotes a challenger worse by the margin more often than promised.

    Args:
        champion: Finite scores; the denominator.
        challenger: Finite scores on the same rows.
        confidence: One-sided, in (0.5, 1).
        num_resamples: R.
        seed: Of the draws.
    """
    _, unit = np.unique(np.asarray(challenger.users), return_inverse=True)
    unit %= _MAX_UNITS
    sums = np.stack(
        [np.bincount(unit, losses(scores.labels, scores.logits)) for scores in (champion, challenger)], axis=1
    )
    total = sums.sum(axis=0)
    difference = float(total[1] / total[0] - 1)
    num_units = len(sums)
    ratios = np.empty(num_resamples)
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK_CELLS // num_units)
    for start in range(0, num_resamples, step):
        rows = min(step, num_resamples - start)
        drawn = rng.integers(0, num_units, (rows, num_units)) + np.arange(rows)[:, None] * num_units
        weights = np.bincount(drawn.ravel(), minlength=rows * num_units).reshape(rows, num_units)
        resampled = weights @ sums
        ratios[start : start + rows] = resampled[:, 1] / resampled[:, 0] - 1
    error = float(ratios.std(ddof=1)) * np.sqrt(num_units / max(num_units - 1, 1))
    normal = difference + NormalDist().inv_cdf(confidence) * error
    upper = max(float(np.quantile(ratios, confidence)), float(normal)) if num_units > 1 else float("inf")
    opposite = 2 * difference - float(normal)  # as far below as the normal approximation lies above
    lower = min(float(np.quantile(ratios, 1 - confidence)), opposite) if num_units > 1 else float("-inf")
    return Comparison(difference=difference, upper=upper, standard_error=float(error), lower=lower)


def promotion_chance(standard_error: float, difference: float, config: GateConfig) -> float:
    """Return the chance that one night is promoted (normal approximation), for `daybreak check`'s gate power.

    Args:
        standard_error: Of the relative NE difference, as in `figures["standard_error"]`; shrinks with the square
            root of the number of users.
        difference: The true relative NE difference: 0 for an equal challenger, the margin for one just too bad.
        config: Margin and confidence.
    """
    if standard_error <= 0:
        return float(difference < config.margin)
    z = NormalDist().inv_cdf(config.confidence)
    return NormalDist().cdf((config.margin - difference) / standard_error - z)
