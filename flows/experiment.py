"""The experiment flow: another config on a night's own data, beside it and without effect on it."""

from __future__ import annotations

import logging
import time
from datetime import date as Date
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.crashes import on_record
from flows.nightly import RUNNER, carry_out, now_us, run_stages, run_to_packs
from flows.runners import Runner
from flows.scheduling import scheduled_day
from flows.watching import watched
from gr_core import experiments
from gr_core.config import Config, load_config
from gr_core.environment import home_uri, prepare_tools
from gr_core.lake.lock import night_lock
from gr_core.night import night_key
from gr_core.stages import aliases, ingesting, outcome

logger = logging.getLogger("gr_core.flows")


def experiment_name() -> str:
    """Name an experiment's run by its name and day."""
    from prefect.runtime import flow_run

    parameters = flow_run.parameters
    return f"experiment {parameters.get('name')} of {parameters.get('date') or 'the night before'}"


@flow(name="experiment", flow_run_name=experiment_name, task_runner=RUNNER)
def experiment(
    name: str,
    date: Date | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    config: str = "conf/world.toml",
    parent: int | None = None,
    home: str | None = None,
    runner: Runner = "threads",
) -> dict[str, Any] | State[Any]:
    """Train another config from a night's own parent on its own data, and set it beside the night's challenger.

    Args:
        name: The experiment's name: letters, digits, dots, dashes and underscores; its MLflow run is <date>-<name>.
        date: The night's lake day; empty: the day before the scheduled start, in the lake's zone.
        overrides: What the experiment changes, each dotted.key=value.
        config: Path of the TOML config.
        parent: The night is the separate attempt that started from this registered version.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/<name of the config>.
        runner: Where buckets are built: threads of this machine, or workers of a Ray cluster (RAY_ADDRESS, else local).

    Returns:
        The experiment, as `daybreak status --json` shows it.
    """
    settings = load_config(config, overrides)
    plain = load_config(config, experiments.night_overrides(overrides))
    day = date or scheduled_day(settings.lake.zone)
    where = home_uri(settings.name, home)
    key = night_key(day, parent, experiments.check_name(name))
    prepare_tools(where)
    with watched():
        while True:
            with night_lock(where, key) as holder:
                if holder is None:
                    with on_record(where, settings=settings):
                        return run_experiment(settings, plain, where, day, name, parent=parent, runner=runner)
            if holder == key:
                message = f"experiment {key} is already running; this start ends"
                return Completed(
                    name="Skipped", message=message, data={"date": key, "state": "running", "reasons": [message]}
                )
            logger.info("%s is running in this home; %s waits for it", holder, key)
            time.sleep(2)


def run_experiment(
    settings: Config, plain: Config, home: str, day: Date, name: str, *, parent: int | None, runner: Runner = "threads"
) -> dict[str, Any]:
    """Run what is missing of an experiment; a night that has not been run yet is run up to its packs, which both use.

    Args:
        settings: The experiment's config.
        plain: The config that the night is opened with where it has not been run yet.
        home: URI of the home, whose lock is held.
        day: The lake day.
        name: The experiment's name.
        parent: The night is the separate attempt that started from this version.
        runner: Where buckets are built.
    """
    aliases.repair_if_moved(settings, home)
    key = night_key(day, parent, name)
    experiments.refuse_other_settings(settings, home, key)
    done = outcome.finished(home, key)
    if done is not None:
        logger.info("experiment %s of %s is finished; nothing to do", name, day)
        return done
    if not outcome.opened(home, night_key(day, parent)):
        ingesting.preflight(plain, home, day)
    night, own = experiments.open_experiment(
        settings, home, day, name, plain=plain, at_us=now_us(), parent_version=parent
    )

    def stages() -> dict[str, Any]:
        if not night.finished:
            run_to_packs(night, runner)
        return run_stages(own, runner)

    return carry_out(own, stages)
