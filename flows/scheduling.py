"""Which day a run is about: from its parameter, else from its scheduled start, never from the clock."""

from __future__ import annotations

from datetime import date as Date
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from gr_core.config import load_config
from gr_core.errors import ConfigError


def day_before(start: datetime, zone: str) -> Date:
    """Return the day before an instant, in a zone."""
    return start.astimezone(ZoneInfo(zone)).date() - timedelta(days=1)


def scheduled_start() -> datetime:
    """Return when the current flow run was first scheduled to start.

    A retry or a re-run from the UI moves the run's expected start; its first scheduled state keeps the time that the
    day comes from (case A4).
    """
    run_id = flow_run.id
    if run_id:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(run_id)
        times = [s.state_details.scheduled_time for s in states if s.state_details.scheduled_time]
        if times:
            return min(times)
    start: datetime = flow_run.scheduled_start_time
    return start


def scheduled_day(zone: str) -> Date:
    """Return the lake day of the current flow run: the day before its first scheduled start."""
    return day_before(scheduled_start(), zone)


def run_name() -> str:
    """Name a flow run by the day it is about, as in `nightly 2025-06-01`."""
    parameters = flow_run.parameters
    day = parameters.get("date")
    if day is None:
        try:
            zone = load_config(parameters.get("config", "conf/world.toml"), parameters.get("overrides", [])).lake.zone
        except ConfigError:
            zone = "UTC"  # the run itself reports what is wrong with the config
        day = scheduled_day(zone)
    return f"{flow_run.flow_name} {day}"
