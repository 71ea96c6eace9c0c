"""Where training's time goes, measured on the newest finished night's own pack; writes nothing in the home."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gr_core.config import Config, parse_config
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import Journal, NightRecord, nights
from gr_core.lake.lineage import FULL_RETRAIN
from gr_core.night import Night, resolve_root, run_stage
from gr_core.stages import training
from gr_core.stages.packing import pack_intact
from gr_core.train.advice import with_evaluation
from gr_core.train.hardware import TERA
from gr_core.train.settings import TrainConfig

logger = logging.getLogger(__name__)

STEPS = 20  # measured where no number is named

# What a first training loop does: every sequence padded to its batch's longest, optimizers and lookups as the library's
# defaults have them, metrics as torchmetrics computes them, full precision, nothing compiled.
NAIVE_TRAIN: dict[str, Any] = {
    "metrics": "naive",
    "fused_optimizer": False,
    "fused_lookup": False,
    "update_touched_rows": False,
    "sparse_update": "step",
    "precision": "fp32",
    "compile": "off",
}
_ONE_RANK = ("fused_lookup", "update_touched_rows")  # baselines of a single process alone
NAIVE_PACK: dict[str, Any] = {"layout": "padded"}


def attribute(
    config: Config, home: str, *, steps: int = STEPS, baseline: bool = False, trace: Path | None = None
) -> dict[str, Any]:
    """Measure training steps as the newest finished night took them, with this config's settings.

    Args:
        config: The run's config; its model must be the night's.
        home: URI of the home.
        steps: Steps to measure.
        baseline: Measure the naive settings as well, on the same pack.
        trace: Where two further steps are recorded for chrome://tracing; None: nowhere.

    Returns:
        steps, seconds, perf, advice, and baseline: the same or None (examples 7).

    Raises:
        UsageError: No finished night has trained, its pack is gone, or `steps` is below 1.
        TrainingError: The measuring child stopped; its own words.
    """
    if steps < 1:
        raise UsageError(f"--steps takes a number from 1 on, got {steps}", where="steps")
    night = newest_trained(config, home)
    packs, words = _inputs(night)
    logger.info("measuring %d steps on the train pack of night %s", steps, night.key)
    found = _measure(night, packs, words, steps, trace)
    beside = None
    if baseline:
        plain = replace(night, config=naive(night.settings, found["perf"]["perf/peak_flops_per_second"]).resolved())
        beside = _measure(plain, packs, words, steps, None)
    return {**found, "baseline": beside}


def newest_trained(config: Config, home: str) -> Night:
    """Return the newest finished night that trained, pinned as it was, with this config's settings.

    An experiment or a full retrain is none: their packs are a night's, or lie in folders of windows.

    Raises:
        UsageError: There is none.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries()).values()
    done = [record for record in records if record.is_finished and record.version is not None]
    trained = [record for record in done if record.experiment is None and record.mode not in FULL_RETRAIN]
    if not trained:
        raise UsageError(
            f"{home} has no finished night that trained, so there is no pack to measure on; run `daybreak nightly` first",
            where=home,
        )
    return _as_pinned(max(trained, key=lambda record: (record.date, record.finished_seq or 0)), config, home)


def _as_pinned(record: NightRecord, config: Config, home: str) -> Night:
    values = {key: value for key, value in record.opened.items() if key in Night.__slots__}
    night = Night.from_json({**values, "parent": record.pinned_parent})
    return replace(night, home=home, config=resolve_root(config, home).resolved(), finished=True)


def _inputs(night: Night) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the night's packs by role and its vocabulary, as its stages recorded them."""

    def recorded(stage: str, part: str = "") -> dict[str, Any]:
        return run_stage(night, stage, None, dict, part=part)  # a finished night's manifest, never the work

    packs = {role: recorded("pack", role) for role in ("train", "holdout")}
    if not pack_intact(packs["train"]):
        raise UsageError(
            f"the train pack of night {night.key} is gone or damaged ({packs['train']['uri']}); a retraction or a forgotten "
            "user takes packs away; run the next night, and attribute that",
            where=packs["train"]["uri"],
        )
    return packs, recorded("vocabulary")


def naive(config: Config, peak: float | None = None) -> Config:
    """Return the config with every optimisation that it can switch off switched off.

    Args:
        config: The night's.
        peak: FLOP/s that its utilisation was measured against: where the precision is the same, so is the peak, which a
            busy machine would not measure alike twice. None: measured anew.
    """
    values = config.resolved()
    known = {field.name for field in fields(TrainConfig)}
    ranks = config.train.distributed.ranks
    chosen = {key: value for key, value in NAIVE_TRAIN.items() if key in known and (ranks == 1 or key not in _ONE_RANK)}
    values["train"] |= chosen
    values["pack"] |= NAIVE_PACK
    if peak is not None and values["train"]["precision"] == config.train.precision:
        values["train"]["peak_tflops"] = peak / TERA
    return parse_config(values)


def _measure(
    night: Night, packs: dict[str, Any], words: dict[str, Any], steps: int, trace: Path | None
) -> dict[str, Any]:
    """Run the measuring child in a folder that is removed afterwards; returns its object and what evaluation adds."""
    config = night.settings
    arguments = ["--attribute", str(steps)] + ([] if trace is None else ["--trace", str(trace.absolute())])
    with tempfile.TemporaryDirectory(prefix="daybreak-attribute-") as folder:
        run = Path(folder) / "RUN.json"
        # paths are relative to the file that a night would write
        values = _rebased(training.run_file(night, packs, words, Path(folder) / "checkpoint", "attribution"), night)
        store.write_json(str(run), values)
        found = training.run_training(
            run, None, timeout_seconds=config.nightly.stage_timeout_seconds, arguments=arguments
        )
    del found["event"]
    share = None if config.evaluation.parallel else 0.0
    return {**found, "advice": with_evaluation(found["advice"], share)}


def _rebased(values: dict[str, Any], night: Night) -> dict[str, Any]:
    """Return RUN.json with absolute paths, so that it may lie anywhere."""
    here = training.workplace(night)

    def absolute(path: str) -> str:
        return str((here / path).resolve())

    tables = values["vocabulary"].items()
    return {
        **values,
        "packs": {role: absolute(path) for role, path in values["packs"].items()},
        "vocabulary": {name: {**table, "path": absolute(table["path"])} for name, table in tables},
        "parent": absolute(values["parent"]) if values["parent"] else None,
        "output": absolute(values["output"]),
    }
