"""prefect.yaml: every deployment names a flow by module, and the nightly one starts once on every day of the year."""

from __future__ import annotations

import asyncio
import importlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from prefect.server.schemas.schedules import CronSchedule as ServerSchedule

from flows.scheduling import day_before

ROOT = Path(__file__).parent.parent.parent
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_a_deployment_names_a_flow_by_module(deployment: dict[str, Any]) -> None:
    """A module entrypoint loads the flow once, under its one name; its given parameters are the flow's."""
    module, _, name = deployment["entrypoint"].rpartition(".")

    found = getattr(importlib.import_module(module), name)

    assert isinstance(found, Flow)
    assert set(deployment.get("parameters", {})) <= set(found.parameters.properties)
    for parameter, described in found.parameters.properties.items():
        assert described.get("description"), f"{name}.{parameter} has no description for the form"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Shanghai", "Europe/London"])
def test_the_nightly_schedule_fires_once_a_day_through_both_shifts(zone: str) -> None:
    """The default hour exists once on every day, so no day is skipped or repeated when clocks shift."""
    (nightly,) = (d for d in DEPLOYMENTS if d["name"] == "nightly")
    cron = nightly["schedules"][0]["cron"]
    assert CronSchedule(cron=cron, timezone=zone).cron == cron
    minute, hour = (int(part) for part in cron.split()[:2])

    day = datetime(2025, 1, 1, hour, minute)  # noqa: DTZ001 -- local wall times, which the zone resolves below
    for _ in range(365):
        early, late = (day.replace(tzinfo=ZoneInfo(zone), fold=fold) for fold in (0, 1))
        assert early.astimezone(UTC) == late.astimezone(UTC), f"{day} is twice in {zone}"
        assert early.astimezone(UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None) == day, f"{day} is not in {zone}"
        day += timedelta(days=1)


@pytest.mark.parametrize(
    ("cron", "shift", "utc"),
    [
        ("30 1 * * *", "2025-11-02", "05:30"),
        ("30 2 * * *", "2025-03-09", "07:30"),
        ("30 4 * * *", "2025-11-02", "09:30"),
    ],
    ids=["autumn", "spring", "default"],
)
def test_no_day_is_skipped_or_repeated_when_clocks_shift(cron: str, shift: str, utc: str) -> None:
    """Prefect's own dates of a schedule through a shift: one start a day, and the days they are about follow (case A6)."""
    zone = ZoneInfo("America/New_York")
    first = datetime.fromisoformat(shift).replace(tzinfo=zone) - timedelta(days=3)

    starts = asyncio.run(ServerSchedule(cron=cron, timezone=zone.key).get_dates(n=7, start=first))

    days = [day_before(start, zone.key) for start in starts]
    assert days == [first.date() + timedelta(days=n - 1) for n in range(7)]
    (on_the_day,) = (start for start in starts if start.astimezone(zone).date().isoformat() == shift)
    assert f"{on_the_day.astimezone(UTC):%H:%M}" == utc
