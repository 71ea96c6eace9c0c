"""What layout and grouping cost in quality: AUC against packed random batches, over seeds, on the same rows.

The nights' data stages run once; every arm and seed packs the night's events anew and trains a lineage of its own.
The difference is taken seed by seed; its interval is Student's at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks._nights import open_day, promote, run_data
from benchmarks._repack import repack
from benchmarks._report import Figure, Report, console
from gr_core.config import Config
from gr_core.eval import metrics
from gr_core.lake import store
from gr_core.night import Night
from gr_core.stages import judging, training

BASE = "packed/none"
ARMS = (BASE, "padded/none", "packed/bucketed", "packed/sorted")
_STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Two-sided 95 % quantiles of Student's distribution by degrees of freedom."""


def measure_layouts(
    report: Report, work: Path, name: str, config: Config, first: Date, sizes: Mapping[str, Any]
) -> None:
    """Add each arm's AUC difference to packed random batches, with its interval in the conditions.

    Args:
        report: Gets the figures.
        work: Where the home lies.
        name: Names the data set.
        config: Its config; `gate.action` is judged.
        first: The first night.
        sizes: seeds, nights, judged_from.
    """
    home = str(work / f"layouts-{name}")
    found = compare(config, home, first, seeds=sizes["seeds"], nights=sizes["nights"], judged_from=sizes["judged_from"])
    for arm in ARMS[1:]:
        differences = [found[arm][seed] - found[BASE][seed] for seed in sizes["seeds"]]
        mean, half = interval(differences)
        report.figures[f"layouts/{name}/{arm}/auc_difference"] = Figure(
            value=mean, unit=f"AUC over {BASE}", baseline=fmean(found[BASE].values())
        )
        report.conditions[f"layouts/{name}/{arm}"] = {
            "difference": mean,
            "low": None if half is None else mean - half,
            "high": None if half is None else mean + half,
            "by_seed": differences,
        }
    report.conditions[f"layouts/{name}"] = {"auc_by_seed": found, "action": config.gate.action, **dict(sizes)}


def interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half of Student's 95 % interval; None for fewer than two seeds."""
    if len(differences) < 2:
        return fmean(differences), None
    spread = stdev(differences) / math.sqrt(len(differences))
    return fmean(differences), _STUDENT_95[len(differences) - 1] * spread


def compare(
    config: Config,
    home: str,
    first: Date,
    *,
    seeds: Sequence[int],
    nights: int,
    judged_from: int,
    arms: Sequence[str] = ARMS,
) -> dict[str, dict[int, float]]:
    """Train every arm and seed along the nights.

    Args:
        config: The config; its own layout, grouping and seed are not used.
        home: URI of the home.
        first: The first night.
        seeds: Of packs and draws.
        nights: How many.
        judged_from: The first night whose new events are judged, from 2 on.
        arms: Layout and grouping of each arm.

    Returns:
        Mean AUC of `gate.action` on the judged nights' new events, by arm and seed.
    """
    lineages: dict[tuple[str, int], str] = {}
    scores: dict[tuple[str, int], list[float]] = {(arm, seed): [] for arm in arms for seed in seeds}
    for number in range(1, nights + 1):
        night = open_day(config, home, first + timedelta(days=number - 1))
        data = run_data(night)
        trained: dict[str, Any] = {}
        for arm, seed in scores:
            own = twin_of(night, f"{arm.replace('/', '-')}-{seed}", lineages.get((arm, seed)), seed)
            if number >= judged_from:
                auc = judged(own, data.packs["next_day"], data.words)["auc"]
                scores[arm, seed].append(float("nan") if auc is None else auc)
            layout, grouping = arm.split("/")
            out = store.local_path(own.uri("pack", "packs", "train"))
            source = store.local_path(data.packs["train"]["uri"])
            pack = repack(source, out, layout=layout, grouping=grouping, seed=seed)
            trained = training.train(own, {"train": pack}, data.words)
            lineages[arm, seed] = trained["uri"]
        promote(night, data, trained)
        console.print(f"layouts: night {number} of {nights}")
    return {arm: {seed: fmean(scores[arm, seed]) for seed in seeds} for arm in arms}


def twin_of(night: Night, name: str, parent: str | None, seed: int | None = None) -> Night:
    """Return a night beside a night, with a lineage of its own; `parent` None: without a parent."""
    ancestor = None if parent is None or night.parent is None else replace(night.parent, checkpoint=parent)
    return replace(night, key=f"{night.key}-{name}", parent=ancestor, seed=night.seed if seed is None else seed)


def judged(night: Night, pack: dict[str, Any], words: dict[str, Any]) -> dict[str, float | None]:
    """Return auc, ne and count of `gate.action` on a night's new events, scored by its parent as the product does."""
    if night.parent is None:
        raise ValueError(f"night {night.key} has no parent to judge")
    scored = judging.score(night, night.parent.checkpoint, pack, words)
    settings = night.settings
    action = settings.gate.action
    bit = settings.source.action_names.index(action)
    newest = store.read_json(store.join(night.parent.checkpoint, "state.json"))["newest_supervised_us"][action]
    rows = np.flatnonzero((scored.label_known >> bit & 1 == 1) & (scored.time > newest))
    labels, logits = scored.labels[rows] >> bit & 1, scored.logits[rows, bit]
    return {"auc": metrics.auc(labels, logits), "ne": metrics.normalized_entropy(labels, logits), "count": len(rows)}
