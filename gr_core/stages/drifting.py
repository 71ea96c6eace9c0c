"""Drift of a night: its figures measured, set beside those that the journal keeps of the nights before, and judged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import date as Date
from typing import Any

import polars as pl

from gr_core.config import Config
from gr_core.data import sequences, vocabulary
from gr_core.eval import drift
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.lake.entries import Entry
from gr_core.lake.journal import Journal, nights, versions
from gr_core.lake.lineage import Lineage
from gr_core.night import Night, run_stage
from gr_core.retrain import MODE, open_retrains
from gr_core.stages.erasing import user_features

logger = logging.getLogger(__name__)

MAX_VALUES = 50
"""A feature of more values has no distribution that is kept: new ids tell of it."""


def measure(night: Night, buckets: Sequence[dict[str, Any]], evaluated: dict[str, Any]) -> dict[str, Any]:
    """Measure a night and judge it beside the nights before.

    Args:
        night: The night.
        buckets: What its sequences returned, bucket by bucket.
        evaluated: What the parent's evaluation returned.

    Returns:
        figures (of this night, kept in the journal), metrics (drift/<key>), triggers ({"kind", "message"}).
    """
    config = night.settings
    past = past_figures(night)
    identity = {
        "evaluated": [evaluated["next_day"], evaluated.get("score_bins")],
        "buckets": [part["fingerprint"] for part in buckets],
        "parent": night.parent.vocabulary if night.parent else None,
        "past": fingerprint([drift.as_json(one) for one in past]),
        "config": config.drift.model_dump(),
    }

    def work() -> dict[str, Any]:
        figures = _figures(night, buckets, evaluated)
        found = drift.judge([*past, figures], config.drift)
        for one in found.triggers:
            logger.warning("night %s, drift: %s", night.key, one["message"])
        return {"figures": drift.as_json(figures), "metrics": found.metrics, "triggers": found.triggers}

    return run_stage(night, "drift", identity, work)


def past_figures(night: Night) -> list[drift.Figures]:
    """Return what the finished nights of the main line before a night have measured, by date."""
    records = [
        r for r in nights(night.journal.entries()).values() if r.is_main and r.is_finished and r.date < night.date
    ]
    told = [(r.status or {}).get("drift") for r in sorted(records, key=lambda record: record.date)]
    return [drift.Figures(**one["figures"]) for one in told if one]


def _figures(night: Night, buckets: Sequence[dict[str, Any]], evaluated: dict[str, Any]) -> drift.Figures:
    config, action = night.settings, night.settings.gate.action
    features, unknown = _ids(night, buckets)
    root, root_date = _root(night.journal.entries(), night)
    return drift.Figures(
        date=night.date,
        root=root,
        root_date=root_date,
        ne=evaluated["next_day"][action]["ne"],
        ne_error=(evaluated.get("next_day_errors") or {}).get(action, {}).get("ne"),
        scores=(evaluated.get("score_bins") or {}).get(action),
        features={name: counts for name, counts in features.items() if name not in user_features(config)},
        unknown_ids=unknown,
    )


def _root(entries: Sequence[Entry], night: Night) -> tuple[int, str]:
    """Return the version at the root of the parent's lineage, and its data day; (0, the night's own) without a parent."""
    if night.parent is None:
        return 0, night.date
    parents, root = Lineage.of(entries).parents, night.parent.version
    while (older := parents.get(root)) is not None:
        root = older
    return root, versions(entries)[root].date


def _ids(night: Night, buckets: Sequence[dict[str, Any]]) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Return events by value of features of few values, and each feature's share of events without a row in the parent."""
    words = vocabulary.load(store.local_copy(night.parent.vocabulary)).tables if night.parent else {}
    features, unknown = {}, {}
    for name in night.settings.model.features:
        parts = [sequences.load_ids(store.local_copy(part["uri"]), name) for part in buckets]
        counts = vocabulary.merge_counts(parts).group_by("id").agg(pl.col("count").sum()).sort("id")
        total = int(counts["count"].sum())
        if 0 < len(counts) <= MAX_VALUES:
            features[name] = {str(value): int(count) for value, count in counts.iter_rows()}
        if name in words and total:
            rows = words[name].ids.filter(pl.col("row") != vocabulary.CANDIDATE)
            strange = counts.join(rows.select("id"), on="id", how="anti")
            unknown[name] = int(strange["count"].sum()) / total
    return features, unknown


def wanted(config: Config, home: str) -> Date | None:
    """Return the day through which a full retrain is to run now without being asked: an unfinished one's, or a trigger's.

    Returns:
        The last lake day; None: drift.retrain is not auto, no trigger in the newest night, or drift.min_days are not over.
    """
    if config.drift.retrain != "auto":
        return None
    entries = Journal(store.join(home, "lake", "journal")).entries()
    unfinished = open_retrains(entries)
    if unfinished:
        return Date.fromisoformat(unfinished[0].date)
    records = nights(entries).values()
    newest = max((r for r in records if r.is_main and r.is_finished), key=lambda r: r.date, default=None)
    triggers = ((newest.status or {}).get("drift") or {}).get("triggers") if newest else None
    if newest is None or not triggers:
        return None
    day = Date.fromisoformat(newest.date)
    last = max((Date.fromisoformat(r.date) for r in records if r.mode == MODE), default=None)
    if last is not None and (day - last).days < config.drift.min_days:
        logger.info("drift: a full retrain through %s was less than drift.min_days ago", last)
        return None
    return day
