"""The full-retrain flow: windows from no parent, beside nights; it holds their lock only for its word at the gate."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date as Date
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.utilities.annotations import unmapped

from flows.crashes import on_record
from flows.nightly import RUNNER, now_us
from flows.runners import MapBuckets, Runner, bucket_runner
from flows.stopping import give_up
from flows.watching import watched
from gr_core.config import Config, load_config
from gr_core.environment import home_uri, prepare_tools
from gr_core.lake.lock import RETRAIN_LOCK, night_lock
from gr_core.night import Night, Parent
from gr_core.retrain import (
    Retrain,
    Window,
    missed,
    newest_checkpoint,
    next_window,
    open_retrain,
    retrain_key,
    window_night,
)
from gr_core.stages import judging, outcome, retraining
from tasks.artifacts import publish_night
from tasks.encode import encode_bucket
from tasks.gate import gate
from tasks.pack import write_pack
from tasks.page import publish_page
from tasks.register import register
from tasks.sequences import build_bucket
from tasks.survey import survey
from tasks.train import train
from tasks.vocabulary import grow_vocabulary

logger = logging.getLogger("gr_core.flows")

RECORDS = "retrain-runs"
"""Where a full retrain's flow run is on record, apart from those of nights, which run beside it."""
WAIT_SECONDS = 5.0
"""Between two looks whether the full retrain of another day has ended."""
CHASES = 3
"""Times that nights may finish while the gate's rows are made; after that the nights wait for the full retrain."""


def retrain_name() -> str:
    """Name a flow run by its last day, as in `full-retrain 2025-06-28`."""
    from prefect.runtime import flow_run

    return f"full-retrain {flow_run.parameters.get('through')}"


@flow(name="full-retrain", flow_run_name=retrain_name, task_runner=RUNNER)
def full_retrain(
    through: Date,
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    runner: Runner = "threads",
) -> dict[str, Any] | State[Any]:
    """Train a new lineage over all days through one, catch up with the nights since, and let the gate judge it.

    Args:
        through: Last lake day of the first pass; its night, or a later one, has finished.
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.
        runner: Where buckets are built: threads of this machine, or workers of a Ray cluster (RAY_ADDRESS, else local).

    Returns:
        The full retrain, as `daybreak status --json` shows it among the nights.
    """
    settings = load_config(config, overrides)
    where = home_uri(settings.name, home)
    prepare_tools(where)
    key = retrain_key(through)
    told = None
    with watched():
        while True:
            with night_lock(where, key, name=RETRAIN_LOCK) as holder:
                if holder is None:
                    with on_record(where, RECORDS):
                        return run_retrain(settings, where, through, runner)
            if holder == key:
                message = f"full retrain {key} is already running; this start ends"
                return Completed(
                    name="Skipped", message=message, data={"date": key, "state": "running", "reasons": [message]}
                )
            if holder != told:
                logger.info("full retrain %s is running in this home; %s waits for it", holder, key)
                told = holder
            time.sleep(WAIT_SECONDS)


def run_retrain(settings: Config, home: str, through: Date, runner: Runner) -> dict[str, Any]:
    """Open the full retrain and run what is missing of it; a finished one is returned as it is."""
    done = outcome.finished(home, retrain_key(through))
    if done is not None:
        logger.info("full retrain through %s is finished (%s); nothing to do", through, done["gate"])
        return done
    retrain = open_retrain(settings, home, through, at_us=now_us())
    try:
        status = run_windows(retrain, runner)
    except BaseException as error:
        give_up(retrain.night, error)
        raise
    shown = outcome.finished(home, retrain.night.key) or status
    publish_night(shown, status.get("mlflow"))
    publish_page(retrain.night, run=status.get("mlflow"))
    return shown


def run_windows(retrain: Retrain, runner: Runner) -> dict[str, Any]:
    """Train what is missing, and be judged on rows that are as new as the newest finished night."""
    surveyed = survey(retrain)
    with bucket_runner(runner) as map_buckets:
        for chase in range(CHASES + 1):
            train_windows(retrain, surveyed, map_buckets)
            judged = prepare(retrain, map_buckets)
            with no_night(retrain):
                if missed(retrain, retrain.entries()) is None:
                    return conclude(retrain, judged)
                if chase == CHASES:
                    train_windows(retrain, surveyed, map_buckets)
                    return conclude(retrain, prepare(retrain, map_buckets))
            logger.info("full retrain %s: a night has finished meanwhile; it catches up once more", retrain.night.key)
    raise AssertionError("not reached")


@contextmanager
def no_night(retrain: Retrain) -> Iterator[None]:
    """Hold the nights' lock for the block; waits for the end of a night that runs."""
    while True:
        with night_lock(retrain.night.home, retrain.night.key) as holder:
            if holder is None:
                yield
                return
        time.sleep(2)


def train_windows(retrain: Retrain, surveyed: dict[str, Any], map_buckets: MapBuckets) -> None:
    """Train the windows that are missing, oldest first, until the newest finished night is caught up with."""
    if surveyed["first"] is None:
        return
    first = Date.fromisoformat(surveyed["first"])
    while (window := next_window(retrain, first, retrain.entries())) is not None:
        train_window(retrain, window, surveyed, map_buckets)


def train_window(retrain: Retrain, window: Window, surveyed: dict[str, Any], map_buckets: MapBuckets) -> None:
    """Train one window by the stages of a night."""
    night = window_night(retrain, window)
    inputs = retraining.start_window(retrain, window)
    every = list(range(night.settings.lake.num_buckets))
    buckets = map_buckets(build_bucket, unmapped(night), unmapped(inputs), every)
    made = None
    if judging.any_due(buckets):
        words = surveyed if window.is_planned else grow_vocabulary(night, buckets)
        encoded = map_buckets(encode_bucket, unmapped(night), buckets, unmapped(words), every)
        pack = write_pack(night, inputs, buckets, encoded, words, "train")
        # nothing is held out of a window: the gate's rows are the newest ones
        trained = train(night, {"train": pack, "holdout": {"num_supervised": 0}}, words)
        parts = {"sequences": buckets, "pack": [*encoded, pack], "train": [trained]}
        seconds = {name: round(sum(part["seconds"] for part in found), 3) for name, found in parts.items()}
        made = {"trained": trained, "words": words, "seconds": seconds}
    retraining.end_window(retrain, window, buckets, made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the gate needs."""

    night: Night
    inputs: dict[str, Any]
    buckets: list[dict[str, Any]]
    words: dict[str, Any]
    pack: dict[str, Any]


def prepare(retrain: Retrain, map_buckets: MapBuckets) -> Judged | None:
    """Make the rows that champion and challenger are compared on; None where nothing was trained."""
    last: Parent | None = newest_checkpoint(retrain.trained(retrain.entries()))
    if last is None:
        return None
    night, inputs = retraining.holdout_inputs(retrain, last)
    every = list(range(night.settings.lake.num_buckets))
    buckets = map_buckets(build_bucket, unmapped(night), unmapped(inputs), every)
    words = grow_vocabulary(night, buckets)  # grows by nothing: the same version, in the folder of the whole
    encoded = map_buckets(encode_bucket, unmapped(night), buckets, unmapped(words), every)
    pack = write_pack(night, inputs, buckets, encoded, words, "holdout")
    return Judged(night=night, inputs=inputs, buckets=buckets, words=words, pack=pack)


def conclude(retrain: Retrain, judged: Judged | None) -> dict[str, Any]:
    """Register the last checkpoint, let the gate decide, and finish; the nights' lock is held."""
    trained = retraining.trained_result(retrain)
    if judged is None or trained is None:
        return retraining.finish(retrain, retrain.night, {})
    night = retraining.root_night(judged.night)
    version = register(night, judged.inputs, trained, retraining.unscored(retrain), judged.words)
    decision = gate(night, version, trained, judged.pack, judged.words, judged.inputs, judged.buckets)
    return retraining.finish(retrain, night, {"train": trained, "register": version, "gate": decision})
