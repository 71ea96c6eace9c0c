"""The stages of a night in the flow's order, without Prefect; it can stop anywhere, as a killed process would."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from gr_core import experiments
from gr_core.config import load_config
from gr_core.night import Night, open_night
from gr_core.stages import experimenting, gating, ingesting, judging, next_night, packing, sequencing, training

STAGES = (
    "ingest",
    "sequences",
    "vocabulary",
    "encode",
    "pack",
    "train",
    "evaluate",
    "next_night",
    "register",
    "gate",
    "finish",
)


def run(
    config: Path,
    home: Path,
    day: date,
    *overrides: str,
    stop_after: str = "finish",
    parent: int | None = None,
    mode: str = "nightly",
) -> tuple[Night, dict[str, Any]]:
    """Open and run a night up to a stage; returns the night and every stage's result."""
    settings = load_config(config, list(overrides))
    ingesting.preflight(settings, str(home), day)
    night = open_night(settings, str(home), day, at_us=1, parent_version=parent, mode=mode)
    done: dict[str, Any] = {}
    stages = STAGES[: STAGES.index(stop_after) + 1]
    for stage in stages:
        done[stage] = _one(night, stage, done)
    return night, done


def run_experiment(
    config: Path, home: Path, day: date, name: str, *overrides: str, stop_after: str = "finish", at_us: int = 2
) -> tuple[Night, dict[str, Any]]:
    """Open and run an experiment up to a stage, its night's stages up to packs first, as the flow does."""
    settings = load_config(config, list(overrides))
    plain = load_config(config, experiments.night_overrides(list(overrides)))
    night, own = experiments.open_experiment(settings, str(home), day, name, plain=plain, at_us=at_us)
    done: dict[str, Any] = {}
    if not night.finished:
        for stage in STAGES[: STAGES.index("pack") + 1]:
            done[stage] = _one(night, stage, done)
    done = {}
    for stage in STAGES[: STAGES.index(stop_after) + 1]:
        done[stage] = _one(own, stage, done)
    return own, done


def _one(night: Night, stage: str, done: dict[str, Any]) -> Any:  # noqa: PLR0911, PLR0912 -- one return a stage
    match stage:
        case "ingest":
            return ingesting.ingest(night)
        case "sequences":
            return [sequencing.build_bucket(night, done["ingest"], b) for b in range(night.settings.lake.num_buckets)]
        case "vocabulary":
            return packing.grow_vocabulary(night, done["sequences"])
        case "encode":
            return [
                packing.encode_bucket(night, part, done["vocabulary"], b) for b, part in enumerate(done["sequences"])
            ]
        case "pack":
            rest = (done["ingest"], done["sequences"], done["encode"], done["vocabulary"])
            return {role: packing.write_pack(night, *rest, role) for role in sequencing.ROLES}
        case "train":
            return training.train(night, done["pack"], done["vocabulary"])
        case "evaluate":
            return judging.evaluate(night, done["pack"]["next_day"], done["vocabulary"])
        case "next_night":
            rest = (done["vocabulary"], done["ingest"], done["sequences"])
            return next_night.check(night, done["pack"]["next_day"], *rest)
        case "register":
            return judging.register(night, done["ingest"], done["train"], done["evaluate"], done["vocabulary"])
        case "gate":
            rest = (done["pack"]["holdout"], done["vocabulary"], done["ingest"], done["sequences"])
            if night.experiment is not None:
                return experimenting.judge(night, done["register"], done["train"], *rest[:2])
            return gating.gate(night, done["register"], done["train"], *rest)
        case _:
            return judging.finish(night, {**done, "pack": [*done["encode"], *done["pack"].values()]})
