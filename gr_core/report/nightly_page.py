"""What the page of a night shows, gathered from the journal's records and what the night's stages wrote; no storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gr_core.lake.ledger import NightRecord
from gr_core.refs import iso
from gr_core.report.attributed import measured
from gr_core.report.status import night_object

STAGES = ("ingest", "train", "evaluate", "gate")
"""Those whose results the page shows."""
NIGHTS = 28
"""Nights that the curves go back."""
_TRAINED = ("auc", "ne", "calibration", "count")  # of an action; others of train/ are of the run
_NORMAL = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """One night on the curves."""

    date: str
    gate: str
    next_day: Mapping[str, Mapping[str, Any]]
    """Metrics of the parent on the night's new events, by action; all that the night wrote of them."""
    spread: Mapping[str, Mapping[str, float | None]]
    """Half of the 95 % interval of AUC and NE, by action."""
    figures: Mapping[str, Any]
    """What the gate decided on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NightPage:
    """All values of a page."""

    key: str
    night: Mapping[str, Any]
    """The night, as `daybreak status --json` shows it."""
    pins: Mapping[str, str]
    """What the night's first attempt pinned, and the bound it reached."""
    past: tuple[Past, ...] = ()
    """The nights of the main line up to this one, which is the last."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Rows put aside, by reason; those of action feeds named so."""
    findings: tuple[Mapping[str, str], ...] = ()
    """What the data checks found."""
    metrics: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Set of events -> action -> metrics, of this night."""
    training: Mapping[str, Any] | None = None
    """Where training's time went, as the object of `stages.attributing.attribute`."""
    perf: Mapping[str, Any] = field(default_factory=dict)
    """All that was measured of training, padding among it; by key perf/*."""
    slices: tuple[Mapping[str, Any], ...] = ()
    """Metrics by slice, of the night's evaluation and gate: rows with role, model, slice and action."""
    missing: tuple[str, ...] = ()
    """Stages that have left no result."""


def collect(record: NightRecord, records: Iterable[NightRecord], results: Mapping[str, Mapping[str, Any]]) -> NightPage:
    """Return the values of a night's page; whatever a night has not written, or not yet, is left out.

    Args:
        record: The night.
        records: All nights of the journal.
        results: Stage -> its result as run_stage returns it, of STAGES those that the night has.
    """
    main = sorted((r for r in records if r.is_main and r.date <= record.date), key=lambda r: (r.date, r.opened_us))
    shown = [*(one for one in main if one.key != record.key), record][-NIGHTS:]
    ingested, trained, evaluated, gated = (results.get(stage) or {} for stage in STAGES)
    by_set = {
        "next day, by the parent": (record.status or {}).get("next_day") or evaluated.get("next_day") or {},
        "late events, by the parent": evaluated.get("late") or {},
        "holdout, by the challenger": gated.get("holdout") or {},
        "training, in passing": _in_training(trained.get("metrics") or {}),
    }
    return NightPage(
        key=record.key,
        night=night_object(record),
        pins=_pins(record),
        past=tuple(_past(one) for one in shown),
        quarantined={
            **(ingested.get("reasons") or {}),
            **{f"{reason} (actions)": count for reason, count in (ingested.get("action_reasons") or {}).items()},
        },
        findings=record.data_findings,
        metrics={name: found for name, found in by_set.items() if any(one.get("count") for one in found.values())},
        training=measured(trained) if trained.get("metrics") else None,
        perf={key: value for key, value in (trained.get("metrics") or {}).items() if value is not None},
        slices=(*(evaluated.get("slices") or ()), *(gated.get("slices") or ())),
        missing=tuple(stage for stage in STAGES if stage not in results),
    )


def _past(record: NightRecord) -> Past:
    status = record.status or {}
    errors = status.get("next_day_errors") or {}
    return Past(
        date=record.date,
        gate=night_object(record)["gate"],
        next_day=status.get("next_day") or {},
        spread={action: {key: interval(error) for key, error in of.items()} for action, of in errors.items()},
        figures=record.figures,
    )


def _pins(record: NightRecord) -> dict[str, str]:
    """Return what was pinned as a person reads it."""
    bound, parent = record.bound, record.parent_watermark
    return {
        "cutoff": iso(record.cutoff_us),
        "event table": "none" if record.commit is None else f"commit {record.commit}, version {record.delta_version}",
        "bound": "none yet" if bound is None else f"commit {bound.commit}, cutoff {bound.cutoff}",
        "parent's watermark": "no parent" if parent is None else f"commit {parent.commit}, cutoff {parent.cutoff}",
        "seed": str(record.seed),
        "config": record.fingerprint,
    }


def _in_training(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return training's running metrics by action, from its flat keys train/<metric>/<action>."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in figures.items():
        role, _, rest = key.partition("/")
        metric, _, action = rest.partition("/")
        if role == "train" and metric in _TRAINED:
            found.setdefault(action, {})[metric] = value
    return found


def interval(standard_error: float | None) -> float | None:
    """Return half of a 95 % interval's width; None where the error is not known."""
    return None if standard_error is None else _NORMAL * standard_error
