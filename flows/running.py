"""The commands that run nights: `daybreak nightly` and `daybreak backfill`. Prefect is imported when a night runs."""

from __future__ import annotations

import argparse
import sys
from datetime import date as Date
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from flows import options, up
from flows.servers import end_orphaned_servers
from gr_core.config import Config
from gr_core.environment import prepare_tools
from gr_core.errors import UsageError
from gr_core.lake.lock import running_night


def nightly(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Run one night, or the next few; returns the object of example 7."""
    if asked.next is not None:
        if asked.next < 1 or asked.date or asked.parent or asked.force or asked.experiment:
            raise UsageError(
                "--next takes a number from 1 on, and no --date, --parent, --force or --experiment", where="next"
            )
        return _next_nights(asked, settings, home)
    status = _one_night(asked, settings, home, asked.date or _usual_day(settings, home))
    if "forced" in status:
        return status, options.DONE if status["forced"]["equal"] else options.FAILED
    return status, options.exit_status(status)


def _usual_day(settings: Config, home: str) -> Date:
    """Return yesterday in the lake's zone; of an embedded world, whose days are no calendar's, the next."""
    if settings.source.world is None:
        return datetime.now(ZoneInfo(settings.lake.zone)).date() - timedelta(days=1)
    from gr_core.stages import outcome

    return outcome.next_day(settings, home)


def _one_night(asked: argparse.Namespace, settings: Config, home: str, day: Date) -> dict[str, Any]:
    """Run a night unless it is finished or already running; bad input ends it before Prefect starts."""
    from gr_core.night import night_key
    from gr_core.stages import aliases, ingesting, outcome

    key = night_key(day, asked.parent, asked.experiment)
    if asked.experiment is not None:
        _check_experiment(asked, settings, home, key)
    done = outcome.finished(home, key)
    if done is not None and asked.force is None:
        aliases.settle(settings, home)
        sys.stderr.write(f"night {key} is finished ({done['state']}, {done['gate']}); nothing to do\n")
        return done
    if asked.force is not None and not outcome.opened(home, key):
        raise UsageError(
            f"--force repeats a stage of an earlier night, and there was no night {key}; name one with --date",
            where="force",
        )
    if running_night(home, watch=True) == key:
        sys.stderr.write(f"night {key} is already running; this start ends\n")
        return {"date": key, "state": "running", "reasons": [f"night {key} is already running; this start ends"]}
    if done is None and not (asked.experiment and outcome.opened(home, night_key(day, asked.parent))):
        ingesting.preflight(settings, home, day)
    prepare(home)
    if asked.experiment is not None:
        from flows.experiment import experiment

        return dict(
            experiment(
                name=asked.experiment,
                date=day,
                overrides=asked.set,
                config=asked.config,
                parent=asked.parent,
                home=home,
                runner=asked.runner,
            )
        )
    from flows.nightly import nightly as flow

    result: Any = flow(
        config=asked.config,
        date=day,
        parent=asked.parent,
        force=asked.force,
        home=home,
        overrides=asked.set,
        runner=asked.runner,
    )
    return dict(result)


def _check_experiment(asked: argparse.Namespace, settings: Config, home: str, key: str) -> None:
    """Refuse what an experiment cannot be, before Prefect starts."""
    from gr_core import experiments

    if asked.force is not None:
        raise UsageError("--experiment takes no --force; give the experiment another name", where="force")
    experiments.check_name(asked.experiment)
    experiments.refuse_other_settings(settings, home, key)


def prepare(home: str) -> None:
    """Make ready for Prefect: its state in the home, no server left behind by a killed run, those of `up` in use."""
    end_orphaned_servers(prepare_tools(home))
    up.use(home)
    from flows import own_server

    own_server.use()


def _next_nights(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    from gr_core.stages import outcome

    nights = []
    for _ in range(asked.next):
        day = outcome.next_day(settings, home)
        if settings.source.world is None and day >= datetime.now(ZoneInfo(settings.lake.zone)).date():
            raise UsageError(f"the next day is {day}, which is not over yet in {settings.lake.zone}", where="next")
        nights.append(_one_night(asked, settings, home, day))
    return {"nights": nights}, options.exit_status(nights[-1])


def backfill(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Run the nights of a range of days, oldest first; returns the object of example 7."""
    if asked.end < asked.start:
        raise UsageError(f"--end {asked.end} lies before --start {asked.start}; swap them", where="end")
    from gr_core.stages import ingesting, outcome

    days = [asked.start + timedelta(days=n) for n in range((asked.end - asked.start).days + 1)]
    open_days = [day for day in days if outcome.finished(home, day.isoformat()) is None]
    if open_days:
        ingesting.preflight(settings, home, open_days[0])
        prepare(home)
        from flows.backfill import backfill as flow

        same: dict[str, Any] = {"config": asked.config, "home": home, "overrides": asked.set}
        flow(start=asked.start, end=asked.end, runner=asked.runner, **same)
    nights = [outcome.finished(home, day.isoformat()) or {"date": day.isoformat(), "state": "running"} for day in days]
    return {"nights": nights}, options.exit_status(nights[-1])


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the commands and their options to those of `daybreak`; `common` are the options that all commands take."""
    night = commands.add_parser(
        "nightly", parents=[common], allow_abbrev=False, help="one night: raw events to a gated model"
    )
    night.add_argument(
        "--date",
        type=options.day,
        help="lake day YYYY-MM-DD (default: yesterday in the lake's zone; of an embedded world its next)",
    )
    night.add_argument("--next", type=int, metavar="N", help="the next N days after the newest night")
    night.add_argument(
        "--parent", type=options.version, metavar="V", help="start from this version, as a separate attempt"
    )
    night.add_argument(
        "--force",
        metavar="STAGE",
        choices=("sequences", "pack", "train", "evaluate"),
        help="repeat a stage of a finished night and compare digests",
    )
    night.add_argument(
        "--experiment",
        metavar="NAME",
        help="another config (--set) on the night's data, beside it and without effect on it",
    )
    options.add_runner(night)
    night.set_defaults(run=nightly, names_home=True)

    many = commands.add_parser(
        "backfill", parents=[common], allow_abbrev=False, help="nights of a range of days, oldest first"
    )
    many.add_argument("--start", type=options.day, required=True)
    many.add_argument("--end", type=options.day, required=True)
    options.add_runner(many)
    many.set_defaults(run=backfill, names_home=True)
