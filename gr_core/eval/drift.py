"""Drift: a night's figures beside those of the nights before; values in, metrics and triggers out.

Each night has measured the parent on its new events (next-day NE of one action with its standard error, a histogram of
the scores), counted the values of features, and the share of events whose id the parent has no row for. Nights are
compared within a lineage, that is since its root, and at equal age with the lineage before. A trigger needs several
nights in a row, a change beyond its threshold, and beyond what chance makes of so few events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from gr_core.drift_config import DriftConfig

SCORE_BINS, SCORE_LIMIT = 64, 8.0
"""Bins of a histogram of logits over [-limit, limit); what lies beyond goes into the outermost."""
GROUPS = 10
"""Groups of about equal mass that a histogram is compared by."""
RARE = 0.01
"""Values with a smaller share of the past are taken together."""
_LEAST = 1e-4  # share that stands for none at all

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a night has measured; plain JSON values."""

    date: str
    root: int
    """Version at the root of the lineage that was measured; 0: there was none."""
    root_date: str
    ne: float | None = None
    ne_error: float | None = None
    """Standard error of `ne`, over users."""
    scores: Sequence[int] | None = None
    """Histogram of logits, [SCORE_BINS]."""
    features: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Events by value, of features of few values."""
    unknown_ids: Mapping[str, float] = field(default_factory=dict)
    """Share of events (0-1) whose id has no row of its own in the parent, by feature."""

    @property
    def age_days(self) -> int:
        """Days since the lineage's root."""
        return (Date.fromisoformat(self.date) - Date.fromisoformat(self.root_date)).days


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What is found of a night."""

    metrics: dict[str, float | None]
    """drift/<key>; None: undefined or nothing to compare with."""
    triggers: list[dict[str, str]]
    """kind (ne | equal_age | psi | unknown_ids | schedule) and message of each reason for a full retrain."""


def histogram(logits: npt.ArrayLike) -> list[int]:
    """Return the histogram of logits, [SCORE_BINS]; those that are not finite are left out."""
    values = np.asarray(logits, np.float64)
    inside = np.clip(values[np.isfinite(values)], -SCORE_LIMIT, np.nextafter(SCORE_LIMIT, 0))
    return [int(count) for count in np.histogram(inside, SCORE_BINS, (-SCORE_LIMIT, SCORE_LIMIT))[0]]


def psi(past: Counts, now: Counts) -> tuple[float, float]:
    """Return the population stability index of two histograms of B bins, and what chance alone makes it (mean and two sigma).

    Args:
        past: Counts, [B]; not all 0.
        now: Counts, [B]; not all 0.
    """
    expected, found = (np.maximum(counts / counts.sum(), _LEAST) for counts in (past, now))
    index = float(np.sum((found - expected) * np.log(found / expected)))
    free = max(len(past) - 1, 0)
    return index, (free + 2 * math.sqrt(2 * free)) * (1 / float(past.sum()) + 1 / float(now.sum()))


def judge(nights: Sequence[Figures], config: DriftConfig) -> Drift:
    """Judge the last of some nights.

    Args:
        nights: The main line's, by date; the last is the one that is judged. At least one.
        config: Thresholds.
    """
    tonight = nights[-1]
    own = [night for night in nights if night.root == tonight.root]
    recent, past = own[-config.nights :], own[: -config.nights][-config.baseline_nights :]
    metrics: dict[str, float | None] = {"drift/days_since_full": tonight.age_days}
    triggers: list[dict[str, str]] = []
    for part in (
        _against_past(recent, past, config),
        _at_equal_age(recent, nights, config),
        _distributions(recent, past, config),
        _ids(recent, past, config),
    ):
        metrics |= part.metrics
        triggers += part.triggers
    if config.max_days and tonight.age_days >= config.max_days:
        message = f"{tonight.age_days} days since the last full retrain, drift.max_days {config.max_days}"
        triggers.append({"kind": "schedule", "message": message})
    return Drift(metrics=metrics | {"drift/triggers": len(triggers)}, triggers=triggers)


def _all(recent: Sequence[Figures], config: DriftConfig, shows: Callable[[Figures], bool]) -> bool:
    """Tell whether enough nights in a row show something."""
    return len(recent) == config.nights and all(shows(night) for night in recent)


def _change(night: Figures, base: float | None) -> float | None:
    return None if night.ne is None or base is None or base <= 0 else night.ne / base - 1


def _usual_ne(past: Sequence[Figures], config: DriftConfig) -> float | None:
    """Return the median NE of the nights before; None: too few have one."""
    known = [night.ne for night in past if night.ne is not None]
    return median(known) if len(known) >= config.min_nights else None


def _against_past(recent: Sequence[Figures], past: Sequence[Figures], config: DriftConfig) -> Drift:
    known = [night for night in past if night.ne is not None]
    base = _usual_ne(past, config)
    errors = [night.ne_error for night in known if night.ne_error is not None]
    # of a median of n values: 1.2533 times the mean's
    base_error = 1.2533 * median(errors) / math.sqrt(len(errors)) if errors else 0.0

    def shows(night: Figures) -> bool:
        change = _change(night, base)
        if change is None or night.ne is None or base is None:
            return False
        noise = config.standard_errors * math.hypot(night.ne_error or 0.0, base_error)
        return change > config.ne_increase and night.ne - base > noise

    change = _change(recent[-1], base)
    triggers = []
    if _all(recent, config, shows) and change is not None:
        message = (
            f"next-day NE is {change:+.1%} on the median of {len(known)} nights before, {config.nights} nights in a row above "
            f"drift.ne_increase {config.ne_increase:+.1%}"
        )
        triggers.append({"kind": "ne", "message": message})
    return Drift(metrics={"drift/ne_change": change}, triggers=triggers)


def _at_equal_age(recent: Sequence[Figures], nights: Sequence[Figures], config: DriftConfig) -> Drift:
    tonight = recent[-1]
    before = [night for night in nights if night.root != tonight.root and night.date < recent[0].date and night.root]
    previous = [night for night in before if night.root == before[-1].root]

    def base_of(night: Figures) -> float | None:
        near = [one.ne for one in previous if one.ne is not None and abs(one.age_days - night.age_days) <= 1]
        return median(near) if near else None

    def shows(night: Figures) -> bool:
        change, base = _change(night, base_of(night)), base_of(night)
        if change is None or base is None or night.ne is None:
            return False
        noise = config.standard_errors * math.sqrt(2) * (night.ne_error or 0.0)
        return change > config.equal_age_increase and night.ne - base > noise

    change = _change(tonight, base_of(tonight))
    triggers = []
    if _all(recent, config, shows) and change is not None:
        message = (
            f"next-day NE is {change:+.1%} on that of the lineage before it, {tonight.age_days} days after its root, "
            f"{config.nights} nights in a row above drift.equal_age_increase {config.equal_age_increase:+.1%}"
        )
        triggers.append({"kind": "equal_age", "message": message})
    return Drift(metrics={"drift/ne_change_equal_age": change}, triggers=triggers)


def _grouped(past: Counts, now: Counts) -> tuple[Counts, Counts]:
    """Merge neighbouring bins into groups of about equal mass of the past."""
    place = np.minimum((np.cumsum(past) - past / 2) / past.sum() * GROUPS, GROUPS - 1).astype(int)
    merged = [np.bincount(place, counts, GROUPS).astype(np.float64) for counts in (past, now)]
    return merged[0], merged[1]


def _by_value(past: Sequence[Mapping[str, int]], now: Mapping[str, int]) -> tuple[Counts, Counts]:
    """Return the counts of the past's usual values, then of all others."""
    total: dict[str, int] = {}
    for counts in past:
        for value, count in counts.items():
            total[value] = total.get(value, 0) + count
    whole = sum(total.values())
    usual = [value for value, count in sorted(total.items()) if count >= RARE * whole]
    then = [total[value] for value in usual]
    here = [now.get(value, 0) for value in usual]
    rest = (whole - sum(then), sum(now.values()) - sum(here))
    if any(rest):
        then, here = [*then, rest[0]], [*here, rest[1]]
    return np.asarray(then, np.float64), np.asarray(here, np.float64)


def _distributions(recent: Sequence[Figures], past: Sequence[Figures], config: DriftConfig) -> Drift:
    metrics: dict[str, float | None] = {}
    triggers = []
    usual = _usual_ne(past, config)

    def learns(night: Figures) -> bool:
        """Tell whether the scores moved because the model got better, as a young lineage's do."""
        change = _change(night, usual)
        return change is not None and change < -config.ne_increase

    scored = [np.asarray(night.scores, np.float64) for night in past if night.scores and sum(night.scores)]
    pairs: dict[str, Callable[[Figures], tuple[Counts, Counts] | None]] = {}
    if len(scored) >= config.min_nights:
        reference = np.sum(scored, axis=0)
        pairs["scores"] = lambda night: (
            _grouped(reference, np.asarray(night.scores, np.float64)) if night.scores and sum(night.scores) else None
        )
    for name in recent[-1].features:
        counted = [night.features[name] for night in past if night.features.get(name)]
        if len(counted) >= config.min_nights:
            pairs[name] = lambda night, name=name, counted=counted: (  # type: ignore[misc]  # bound as defaults
                _by_value(counted, night.features[name]) if night.features.get(name) else None
            )
    for name, pair in pairs.items():
        limit = config.psi_scores if name == "scores" else config.psi_features
        found = [None if (counts := pair(night)) is None else psi(*counts) for night in recent]
        metrics[f"drift/psi/{name}"] = found[-1][0] if found[-1] else None
        beyond = [
            one is not None and one[0] - one[1] > limit and not (name == "scores" and learns(night))
            for one, night in zip(found, recent, strict=True)
        ]
        if len(beyond) == config.nights and all(beyond) and found[-1]:
            key = "drift.psi_scores" if name == "scores" else "drift.psi_features"
            message = f"population stability index of {name} {found[-1][0]:.2f}, {config.nights} nights in a row above {key} {limit:g}"
            triggers.append({"kind": "psi", "message": message})
    return Drift(metrics=metrics, triggers=triggers)


def _ids(recent: Sequence[Figures], past: Sequence[Figures], config: DriftConfig) -> Drift:
    metrics: dict[str, float | None] = {}
    triggers = []
    for name, share in recent[-1].unknown_ids.items():
        metrics[f"drift/unknown_ids/{name}"] = share
        known = [night.unknown_ids[name] for night in past if name in night.unknown_ids]
        if len(known) < config.min_nights:
            continue
        base = median(known)
        if _all(
            recent,
            config,
            lambda night, base=base, name=name: (  # type: ignore[misc]  # bound as defaults
                night.unknown_ids.get(name, 0.0) - base > config.unknown_ids_increase
            ),
        ):
            message = (
                f"{share:.1%} of events have a {name} without a row of its own, {base:.1%} before, {config.nights} nights in a "
                f"row more by drift.unknown_ids_increase {config.unknown_ids_increase:.1%}"
            )
            triggers.append({"kind": "unknown_ids", "message": message})
    return Drift(metrics=metrics, triggers=triggers)


def as_json(figures: Figures) -> dict[str, Any]:
    """Return a night's figures as the journal keeps them."""
    return {
        name: getattr(figures, name)
        for name in ("date", "root", "root_date", "ne", "ne_error", "scores", "features", "unknown_ids")
    }
