"""`python -m benchmarks.quality`: what ten nights predict, against what can be known.

KuaiRand: the parent's AUC on the new events of nights 4-10 over three seeds, the time and memory of a night. Embedded
world: on the same rows, the world's own probabilities (truth), the model, item popularity, and the same model trained
along a lineage of its own on histories that have lost their order. Everything is measured in this run by the product's
own stages; only the `baseline` column is quoted.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from benchmarks._nights import NightResult, TrainingMemory, run_night
from benchmarks._report import Figure, Report, conclude, console, text_of
from benchmarks._shuffle import shuffle_pack
from gr_core.config import Config, load_config
from gr_core.data import synthetic
from gr_core.eval import metrics
from gr_core.eval.scoring import Scored
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.stages import gating, judging, training

CONF = Path(__file__).parent.parent / "conf"
KUAIRAND_FIRST = Date(2022, 4, 25)
KUAIRAND_BASELINE = {"click": 0.714, "long_view": 0.735}
"""Smoothed user and item counts up to the day before, mean over later days: the mark of the data set's own notes."""
NUM_NIGHTS, QUICK_NIGHTS = 10, 3
KUAIRAND_JUDGED_FROM, WORLD_JUDGED_FROM = 4, 8
ACTION = "click"
ARMS = ("truth", "model", "popularity", "shuffled")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal (never with --quick), else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="three nights, one seed, no goals: does it run")
    parser.add_argument("--only", choices=["world", "kuairand"], help="one of the two data sets (default: both)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="KuaiRand's pack.seed; the first two: worlds"
    )
    parser.add_argument("--source", type=Path, default=Path("../shared/data/kuairand"), help="KuaiRand's raw files")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    seeds = options.seeds[:1] if options.quick else options.seeds
    num_nights = QUICK_NIGHTS if options.quick else NUM_NIGHTS
    report = Report(conditions=_conditions(seeds, num_nights, quick=options.quick))
    # KuaiRand first: the peak memory of this process is never given back to zero.
    if options.only != "world":
        measure_kuairand(report, options.source, seeds, num_nights)
    if options.only != "kuairand":
        measure_world(report, seeds[:2], num_nights)

    return conclude(report, enforce=not options.quick, as_json=options.json)


def measure_kuairand(report: Report, source: Path, seeds: Sequence[int], num_nights: int) -> None:
    """Run KuaiRand's nights once a seed and add their figures; a missing source is said in the conditions."""
    if not (source / "log").is_dir():
        report.conditions["kuairand"] = "skipped: the raw files are not there; name their folder with --source"
        console.print(f"kuairand skipped: {source} has no folder log/")
        return
    runs: list[list[NightResult]] = []
    with TrainingMemory() as memory:
        for seed in seeds:
            overrides = [f"source.root={source.resolve()}", f"pack.seed={seed}"]
            config = load_config(CONF / "kuairand.toml", overrides)
            with tempfile.TemporaryDirectory(prefix="quality-") as home:
                runs.append(list(_nights(f"kuairand seed {seed}", config, home, KUAIRAND_FIRST, num_nights)))
    add_kuairand(report, runs, seeds)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.figures["kuairand/peak_memory_bytes/stages"] = Figure(value=own, unit="bytes")
    report.figures["kuairand/peak_memory_bytes/training"] = Figure(value=memory.peak_bytes or None, unit="bytes")


def add_kuairand(report: Report, runs: Sequence[Sequence[NightResult]], seeds: Sequence[int]) -> None:
    """Add the figures of KuaiRand's nights.

    Args:
        report: Gets the figures, and AUC day by day in its conditions.
        runs: One list of nights a seed.
        seeds: As many seeds.
    """
    first = min(KUAIRAND_JUDGED_FROM, len(runs[0]) - 1)
    by_seed: dict[str, Any] = {}
    for action, baseline in KUAIRAND_BASELINE.items():
        means = [_mean(night.auc(action) for night in run[first - 1 :]) for run in runs]
        figure = Figure(value=_mean(means), unit="AUC", at_least=0.750, baseline=baseline)
        report.figures[f"kuairand/next_day/auc/{action}"] = figure
        by_seed[action] = {str(seed): mean for seed, mean in zip(seeds, means, strict=True)}
    nights = [night for run in runs for night in run]
    rates = [float(night.trained["metrics"]["perf/tokens_per_second"]) for night in nights]
    report.figures |= {
        "kuairand/train_seconds": Figure(value=median(n.trained["seconds"] for n in nights), unit="s", at_most=20.0),
        "kuairand/tokens_per_second": Figure(value=median(rates), unit="tokens/s"),
        "kuairand/night_seconds": Figure(value=median(n.seconds for n in nights), unit="s"),
        "kuairand/total_seconds": Figure(value=fmean(sum(n.seconds for n in run) for run in runs), unit="s"),
    }
    report.conditions["kuairand"] = {
        "judged_nights": [night.night.date for night in runs[0][first - 1 :]],
        "auc_by_seed": by_seed,
        "nights": [
            {"seed": seed, **_night_row(night, KUAIRAND_BASELINE)}
            for seed, run in zip(seeds, runs, strict=True)
            for night in run
        ],
        "night_seconds": "median; stages one after the other, without Prefect, registry and gate",
        "total_seconds": "the nights of one seed, mean over seeds",
    }


def measure_world(report: Report, seeds: Sequence[int], num_nights: int) -> None:
    """Run the embedded world's nights once a world and add their figures."""
    report.conditions["world"] = {}
    for seed in seeds:
        config = load_config(CONF / "world.toml", [f"source.world.seed={seed}"])
        with tempfile.TemporaryDirectory(prefix="quality-") as home:
            judged = run_world(f"world {seed}", config, home, num_nights)
        add_world(report, seed, judged)


def run_world(label: str, config: Config, home: str, num_nights: int) -> list[dict[str, Any]]:
    """Run a world's nights, and beside them the lineage that trains on shuffled histories.

    Returns:
        For each of nights 8-10 (of a shorter run: the last), date, rows, positives and the click AUC of every arm.
    """
    world = config.source.world
    if world is None:
        raise ValueError("run_world needs a config with source.world")
    shuffled: str | None = None
    judged: list[dict[str, Any]] = []
    first = min(WORLD_JUDGED_FROM, num_nights)
    for number, result in enumerate(_nights(label, config, home, world.start, num_nights), start=1):
        parent, twin = shuffled, _Shuffled.of(result, shuffled, judged=number >= first)
        if number >= first and parent is not None:
            judged.append(judge_arms(result, twin, parent))
            console.print(f"{label} night {number}: " + ", ".join(f"{arm} {text_of(judged[-1][arm])}" for arm in ARMS))
        if number < num_nights:
            shuffled = twin.train(result)
    return judged


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shuffled:
    """A night's twin whose packs have shuffled histories and whose parent is the twin of the night before."""

    night: Any
    packs: dict[str, Any]

    @classmethod
    def of(cls, result: NightResult, parent: str | None, *, judged: bool) -> _Shuffled:
        """Write the twin's train pack, and next_day's where the night is judged.

        Args:
            result: The night.
            parent: Checkpoint of the twin before; None on the first night.
            judged: The night is one of those that are compared.
        """
        night = result.night
        if night.parent is not None and parent is not None:
            night = replace(night, parent=replace(night.parent, checkpoint=parent))
        night = replace(night, key=f"{night.key}-shuffled")
        packs = {}
        for place, role in enumerate(("train", "next_day") if judged else ("train",)):
            uri = night.uri("pack", "packs", role)
            source, out = store.local_path(result.packs[role]["uri"]), store.local_path(uri)
            index = shuffle_pack(source, out, seed=2 * night.day.toordinal() + place)
            packs[role] = {"uri": uri, "digest": fingerprint(index["sha256"])}
        return cls(night=night, packs=packs)

    def train(self, result: NightResult) -> str:
        """Train as the night itself was trained; returns the checkpoint's URI."""
        return str(training.train(self.night, self.packs, result.words)["uri"])


def judge_arms(result: NightResult, twin: _Shuffled, shuffled_parent: str) -> dict[str, Any]:
    """Return the click AUC of every arm on the same rows: the night's next_day events, as the product judges them."""
    night, words = result.night, result.words
    if night.parent is None:
        raise ValueError(f"night {night.key} has no parent to judge")
    model = judging.score(night, night.parent.checkpoint, result.packs["next_day"], words)
    other = judging.score(twin.night, shuffled_parent, twin.packs["next_day"], words)
    bit = night.settings.source.action_names.index(ACTION)
    state = store.read_json(store.join(night.parent.checkpoint, "state.json"))
    newest = state["newest_supervised_us"][ACTION]
    ids, labels, logits = _click_rows(model, bit, newest)
    same_ids, same_labels, shuffled_logits = _click_rows(other, bit, newest)
    if ids != same_ids or not np.array_equal(labels, same_labels):
        raise ValueError(f"night {night.key}: the shuffled pack has other rows than the pack it was made from")
    scores = {
        "truth": true_probabilities(night.settings, night.day, ids),
        "model": logits,
        "popularity": _popularity(result, ids),
        "shuffled": shuffled_logits,
    }
    found = {arm: metrics.auc(labels, scores[arm]) for arm in ARMS}
    product = result.auc(ACTION)
    if product is None or found["model"] is None or abs(product - found["model"]) > 1e-6:
        raise ValueError(
            f"night {night.key}: AUC {found['model']} on the judged rows, the evaluate stage has {product}"
        )
    return {"date": night.date, "rows": len(ids), "positives": int(labels.sum()), **found}


def _click_rows(scored: Scored, bit: int, newest_us: int) -> tuple[list[str], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return (event ids, labels, logits) of the next_day rows of one action, in the order of their event ids."""
    rows = np.flatnonzero((scored.label_known >> bit & 1 == 1) & (scored.time > newest_us))
    ids = [scored.event_ids[row] for row in rows.tolist()]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    rows = rows[order]
    return [ids[i] for i in order], scored.labels[rows] >> bit & 1, scored.logits[rows, bit]


def true_probabilities(config: Config, day: Date, event_ids: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the world's own click probability of each event; late ones belong to the two days before.

    Raises:
        KeyError: An event that the world did not make.
    """
    if config.source.world is None:
        raise ValueError("only an embedded world knows its truth; set source.world")
    known: dict[str, float] = {}
    for back in range(3):
        table = synthetic.truth(config.source.world, day - timedelta(days=back))
        known.update(zip(table["event_id"].to_pylist(), table[ACTION].to_pylist(), strict=True))
    return np.asarray([known[event] for event in event_ids], np.float64)


def _popularity(result: NightResult, event_ids: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the smoothed click rate of each event's item up to the parent's watermark: past days only."""
    night = result.night
    if night.parent is None:
        raise ValueError(f"night {night.key} has no past days")
    past = night.parent.watermark.to_json() | {"delta_version": result.ingested["bound"]["delta_version"]}
    judged = pl.DataFrame({"event_id": event_ids})
    return np.asarray(gating.smoothed_counts(night, night.settings, {"watermark": past}, judged), np.float64)


def add_world(report: Report, seed: int, judged: Sequence[Mapping[str, Any]]) -> None:
    """Add one world's figures: the mean of its judged nights, each arm on the same rows."""
    truth, model, popularity, shuffled = (_mean(night[arm] for night in judged) for arm in ARMS)
    name = f"world/{seed}/{ACTION}"
    report.figures |= {
        f"{name}/auc/truth": Figure(value=truth, unit="AUC", at_least=0.80),
        f"{name}/auc/model": Figure(value=model, unit="AUC", baseline=popularity),
        f"{name}/auc/popularity": Figure(value=popularity, unit="AUC", at_most=0.68),
        f"{name}/auc/shuffled": Figure(value=shuffled, unit="AUC"),
        f"{name}/gap_to_truth": Figure(value=_difference(truth, model), unit="AUC", at_most=0.03),
        f"{name}/loss_of_shuffling": Figure(value=_difference(model, shuffled), unit="AUC", at_least=0.03),
    }
    report.conditions["world"][str(seed)] = [dict(night) for night in judged]


def _nights(label: str, config: Config, home: str, first: Date, count: int) -> Iterable[NightResult]:
    """Run nights in order and say how each went; yields after each, before the next one starts."""
    for number in range(1, count + 1):
        result = run_night(config, home, first + timedelta(days=number - 1))
        aucs = {action: result.auc(action) for action in result.evaluated["next_day"]}
        said = ", ".join(f"{action} {auc:.4f}" for action, auc in aucs.items() if auc is not None)
        console.print(
            f"{label} night {number}/{count} {result.night.date}: {result.packs['train']['num_supervised']:,} "
            f"supervised, training {result.trained['seconds']:.1f} s of {result.seconds:.1f} s; parent's AUC: "
            f"{said or 'no parent'}",
            highlight=False,
            soft_wrap=True,
        )
        yield result


def _night_row(night: NightResult, actions: Iterable[str]) -> dict[str, Any]:
    return {
        "date": night.night.date,
        "supervised": night.packs["train"]["num_supervised"],
        "new_events": night.packs["next_day"]["num_supervised"],
        **{action: night.auc(action) for action in actions},
        "train_seconds": night.trained["seconds"],
        "seconds": round(night.seconds, 3),
    }


def _conditions(seeds: Sequence[int], num_nights: int, *, quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "seeds": list(seeds),
        "num_nights": num_nights,
        "machine": platform.machine(),
        "system": platform.system(),
        "num_cpus": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None when a value is None or there is none."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


if __name__ == "__main__":
    sys.exit(main())
