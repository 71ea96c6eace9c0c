"""The nightly flow: order, fan-out and parameters only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date as Date
from datetime import datetime
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import unmapped

from flows.alerting import telling
from flows.catching_up import catch_up
from flows.crashes import on_record
from flows.drifting import follow
from flows.runners import Runner, bucket_runner
from flows.scheduling import run_name, scheduled_day
from flows.stopping import give_up
from flows.watching import watched
from gr_core import grouping, progress
from gr_core.config import Config, load_config
from gr_core.environment import home_uri, prepare_tools
from gr_core.lake.lock import night_lock
from gr_core.night import Night, night_key, open_night
from gr_core.stages import aliases, ingesting, judging, outcome, sequencing, tidying
from tasks.announce import announce
from tasks.artifacts import publish_night
from tasks.attribution import publish_training
from tasks.beside import judge_beside
from tasks.drift import measure_drift
from tasks.encode import encode_bucket
from tasks.evaluate import evaluate
from tasks.gate import gate
from tasks.ingest import ingest
from tasks.next_night import check_champion, publish_check
from tasks.pack import write_pack
from tasks.page import publish_page
from tasks.register import register
from tasks.sequences import build_bucket
from tasks.slices import publish_slices
from tasks.train import train
from tasks.vocabulary import grow_vocabulary

Mode = Literal["nightly", "backfill"]
Force = Literal["sequences", "pack", "train", "evaluate"]

logger = logging.getLogger("gr_core.flows")

RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=4)


@flow(name="nightly", flow_run_name=run_name, task_runner=RUNNER)
def nightly(
    config: str = "conf/world.toml",
    date: Date | None = None,
    parent: int | None = None,
    force: Force | None = None,
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    runner: Runner = "threads",
    mode: Mode = "nightly",
) -> dict[str, Any] | State[Any]:
    """Take one day of raw events to a gated, registered model, warm-started from the champion.

    Args:
        config: Path of the TOML config.
        date: The lake day; empty: the day before the scheduled start, in the lake's zone.
        parent: Start from this registered version instead of the champion, as a separate attempt.
        force: Repeat one stage of a finished night beside its result and compare digests.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.
        runner: Where buckets are built: threads of this machine, or workers of a Ray cluster (RAY_ADDRESS, else local).
        mode: How the night is recorded; leave as it is.

    Returns:
        The night, as `daybreak status --json` shows it.
    """
    settings = load_config(config, overrides)
    day = date or scheduled_day(settings.lake.zone)
    where = home_uri(settings.name, home)
    prepare_tools(where)
    key = night_key(day, parent)

    def night() -> dict[str, Any]:
        return run_night(settings, where, day, parent=parent, force=force, mode=mode, runner=runner)

    def missed(other: Date) -> object:
        return nightly(config=config, date=other, home=home, overrides=overrides, runner=runner)

    with watched():
        if date is None and parent is None and force is None:
            catch_up(settings, where, day, missed)
        while True:
            with night_lock(where, key) as holder:
                if holder is None:
                    with on_record(where, settings=settings):
                        status = telling(settings, where, day, night)
                    break
            if holder == key:
                message = f"night {key} is already running; this start ends"
                return Completed(
                    name="Skipped", message=message, data={"date": key, "state": "running", "reasons": [message]}
                )
            logger.info("night %s is running in this home; %s waits for it", holder, key)
            time.sleep(2)
        if mode == "nightly" and parent is None and force is None:
            follow(settings, where, {"config": config, "overrides": overrides, "runner": runner})
        return status


def run_night(
    settings: Config,
    home: str,
    day: Date,
    *,
    parent: int | None,
    force: str | None,
    mode: str,
    runner: Runner = "threads",
) -> dict[str, Any]:
    """Open the night and run what is missing of it; a finished one is returned as it is."""
    aliases.repair_if_moved(settings, home)
    done = outcome.finished(home, night_key(day, parent))
    if done is not None and force is None:
        logger.info("night %s is finished (%s); nothing to do", day, done["gate"])
        return done
    if done is None:
        ingesting.preflight(settings, home, day)
        uncompared = grouping.warning(settings, home)
        if uncompared is not None:
            logger.warning("%s", uncompared)
    night = open_night(settings, home, day, at_us=now_us(), mode=mode, parent_version=parent, force=force)
    if done is not None:
        return done | {"forced": repeat_stage(night)}
    return carry_out(night, lambda: run_stages(night, runner))


def carry_out(night: Night, stages: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run an open night's or experiment's stages, publish what came of them, and tidy up; a failure is told to the journal."""
    try:
        status = stages()
    except BaseException as error:
        give_up(night, error)
        raise
    publish_night(status, status.get("mlflow"))
    publish_page(night, run=status.get("mlflow"))
    tidying.tidy(night)
    progress.clear(night.home, night.key)
    return outcome.finished(night.home, night.key) or status


def run_to_packs(night: Night, runner: Runner) -> dict[str, Any]:
    """Run the stages up to packs, buckets side by side; what follows the sequences is left out where nothing is due."""
    progress.clear(night.home, night.key)
    ingested = ingest(night)
    every = list(range(night.settings.lake.num_buckets))
    with bucket_runner(runner) as map_buckets:
        buckets = map_buckets(build_bucket, unmapped(night), unmapped(ingested), every)
        results = {"ingest": ingested, "sequences": buckets}
        if not judging.any_due(buckets):
            return results
        words = grow_vocabulary(night, buckets)
        encoded = map_buckets(encode_bucket, unmapped(night), buckets, unmapped(words), every)
    packs = _write_packs(night, ingested, buckets, encoded, words)
    return results | {"vocabulary": words, "encode": encoded, "packs": packs}


def run_stages(night: Night, runner: Runner = "threads") -> dict[str, Any]:
    """Run the stages in order, the parent's evaluation beside training; an experiment is judged by nobody's gate."""
    made = run_to_packs(night, runner)
    ingested, buckets = made["ingest"], made["sequences"]
    results = {"ingest": ingested, "sequences": buckets}
    if "packs" not in made:
        return judging.finish(night, results, ended_us=now_us())
    words, encoded, packs = made["vocabulary"], made["encode"], made["packs"]
    training = train.submit(night, packs, words)
    evaluation = evaluate.submit(night, packs["next_day"], words)
    checking = check_champion.submit(night, packs["next_day"], words, ingested, buckets)
    beside: list[PrefectFuture[Any]] = [training, evaluation, checking, announce.submit(night)]
    wait(beside)
    trained, evaluated, checked = training.result(), evaluation.result(), checking.result()
    publish_training(night.key, trained)
    version = register(night, ingested, trained, evaluated, words)
    if night.experiment is None:
        publish_check(night.key, checked)
        results["drift"] = measure_drift(night, buckets, evaluated)
        decision = gate(night, version, trained, packs["holdout"], words, ingested, buckets)
    else:
        decision = judge_beside(night, version, trained, packs["holdout"], words)
    publish_slices(night.key, evaluated, decision)
    results |= {"pack": [*encoded, *packs.values()], "train": trained, "evaluate": evaluated, "next_night": checked}
    return judging.finish(night, results | {"register": version, "gate": decision}, ended_us=now_us())


def _write_packs(
    night: Night,
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
    encoded: list[dict[str, Any]],
    words: dict[str, Any],
) -> dict[str, Any]:
    """Write the packs of all roles side by side."""
    inputs = [unmapped(value) for value in (night, ingested, buckets, encoded, words)]
    packs = write_pack.map(*inputs, list(sequencing.ROLES)).result()
    return dict(zip(sequencing.ROLES, packs, strict=True))


def repeat_stage(night: Night) -> dict[str, Any]:
    """Repeat one stage of a finished night beside its result, from the night's own inputs, and compare digests."""
    kept = replace(night, force=None)
    ingested = ingest(kept)
    every = list(range(night.settings.lake.num_buckets))
    buckets = build_bucket.map(unmapped(kept), unmapped(ingested), every).result()
    words = grow_vocabulary(kept, buckets)
    encoded = encode_bucket.map(unmapped(kept), buckets, unmapped(words), every).result()
    packs = _write_packs(kept, ingested, buckets, encoded, words)
    match night.force:
        case "sequences":
            again = build_bucket.map(unmapped(night), unmapped(ingested), every).result()
            pairs = list(zip(buckets, again, strict=True))
        case "pack":
            repeated = _write_packs(night, ingested, buckets, encoded, words)
            pairs = [(packs[role], repeated[role]) for role in sequencing.ROLES]
        case "train":
            pairs = [(train(kept, packs, words), train(night, packs, words))]
        case _:
            pairs = [(evaluate(kept, packs["next_day"], words), evaluate(night, packs["next_day"], words))]
    digests = [[judging.result_digest(one) for one in pair] for pair in pairs]
    return {"stage": night.force, "equal": all(was == now for was, now in digests), "digests": digests}


def now_us() -> int:
    """Return the time in microseconds since the epoch; flows may look at the clock, gr_core never does."""
    return round(time.time() * 1e6)


def today(zone: Any) -> Date:
    """Return today's date in a zone."""
    return datetime.now(zone).date()
