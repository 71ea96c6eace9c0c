"""The backfill flow: nights of several days, oldest first, one at a time; a failure stops the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import date as Date
from datetime import timedelta
from typing import Any

from prefect import flow

from flows.nightly import nightly
from flows.runners import Runner
from gr_core.config import load_config
from gr_core.environment import home_uri
from gr_core.errors import DaybreakError, UsageError
from gr_core.lake.lock import running_night
from gr_core.report.backfilled import day_rows, stopped_message
from tasks.backfill import publish_backfill

POLL_SECONDS = 2.0

logger = logging.getLogger("gr_core.flows")


def backfill_name() -> str:
    """Name a backfill run by its days."""
    from prefect.runtime import flow_run

    given = flow_run.parameters
    days = sorted(str(day) for day in given.get("days") or [given.get("start"), given.get("end")] if day)
    return f"backfill {days[0]} to {days[-1]}" if days else "backfill"


@flow(name="backfill", flow_run_name=backfill_name)
def backfill(
    start: Date | None = None,
    end: Date | None = None,
    days: list[Date] = [],  # noqa: B006 -- Prefect copies parameters
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    runner: Runner = "threads",
) -> dict[str, Any]:
    """Run the nights of a range of days, or of a list, oldest first; finished ones are passed over.

    A day after the champion's is a night like any other. An older one starts from the model of the nearest night
    before it and is registered, never promoted. When a day fails, no later one is started.

    Args:
        start: First lake day.
        end: Last lake day, included.
        days: The lake days one by one instead of start and end, in any order.
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.
        runner: Where buckets are built: threads of this machine, or workers of a Ray cluster (RAY_ADDRESS, else local).

    Returns:
        {"nights": [...]}, oldest first.
    """
    chosen = oldest_first(start, end, days)
    where = home_uri(load_config(config, overrides).name, home)
    same: dict[str, Any] = {"config": config, "home": home, "overrides": overrides, "runner": runner}
    nights: list[dict[str, Any]] = []
    for day in chosen:
        try:
            nights.append(run_day(day, where, same))
        except Exception as error:
            publish_backfill(day_rows(chosen, nights, error))
            message = stopped_message(chosen, nights, error)
            logger.error("%s", message)
            if isinstance(error, DaybreakError):
                raise type(error)(message, where=error.where) from error
            raise DaybreakError(message, where=str(day)) from error
    publish_backfill(day_rows(chosen, nights))
    return {"nights": nights}


def oldest_first(start: Date | None, end: Date | None, days: Iterable[Date] = ()) -> list[Date]:
    """Return the days to run in order, each once (case E8); UsageError unless either a range or a list is given."""
    listed = sorted(set(days))
    if listed and (start is not None or end is not None):
        raise UsageError("a backfill takes a range (start and end) or a list (days), not both", where="days")
    if listed:
        return listed
    if start is None or end is None:
        raise UsageError("a backfill needs both --start and --end, or a list of days in the flow", where="start")
    if end < start:
        raise UsageError(f"--end {end} lies before --start {start}; swap them", where="end")
    return [start + timedelta(days=n) for n in range((end - start).days + 1)]


def run_day(day: Date, home: str, same: dict[str, Any]) -> dict[str, Any]:
    """Run one day's night; where another process is running that very night, wait for how it ends."""
    while True:
        night: dict[str, Any] = nightly(date=day, mode="backfill", **same)
        if night.get("state") != "running":
            return night
        logger.info("night %s is running elsewhere; the backfill waits for it", day)
        while running_night(home, watch=True) == day.isoformat():
            time.sleep(POLL_SECONDS)
