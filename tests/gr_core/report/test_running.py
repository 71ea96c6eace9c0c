"""What status tells of a night that runs, and the forecast of when it will be done."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from gr_core.lake.ledger import NightRecord
from gr_core.report.running import forecast, under_way, usual_seconds
from gr_core.report.status import STAGES, Promise, render_status

DAY = date(2025, 6, 4)
MINUTE_US = 60_000_000


def at(hour: int, minute: int = 0) -> int:
    """Return a time of the day after DAY in microseconds since the epoch."""
    return round(datetime(2025, 6, 5, hour, minute, tzinfo=UTC).timestamp() * 1e6)


def night(number: int, minutes: float | None, *, attempts: int = 1, train: float = 1800.0) -> NightRecord:
    """Return a finished night that took so long in all, and 30 min of training unless told otherwise."""
    key = str(date(2025, 6, number))
    return NightRecord(
        key=key,
        date=key,
        mode="nightly",
        attempts=({},) * attempts,
        state="completed",
        version=number,
        finished_us=1,
        elapsed_us=None if minutes is None else round(minutes * MINUTE_US),
        status={"seconds": {"train": train, "ingest": 600.0, "evaluate": 9999.0}},
    )


def test_a_running_night_tells_its_stages_steps_and_seconds() -> None:
    """Ended stages have their seconds, the running ones those so far; vocabulary and encoding count as pack."""
    told = {
        "ingest": {"started_us": at(4), "running": 0, "parts": 1, "ended_us": at(4, 1)},
        "vocabulary": {"started_us": at(4, 1), "running": 0, "parts": 1, "ended_us": at(4, 2)},
        "pack": {"started_us": at(4, 2), "running": 0, "parts": 3, "ended_us": at(4, 4)},
        "train": {"started_us": at(4, 4), "running": 1, "step": 30, "steps": 120},
        "evaluate": {"started_us": at(4, 4), "running": 1},
    }
    plain = {"date": str(DAY), "state": "running", "reasons": [], "seconds": dict.fromkeys(STAGES, 0.0)}

    shown = under_way(plain, told, at(4, 10))

    assert shown["seconds"] == plain["seconds"] | {"ingest": 60.0, "pack": 180.0, "train": 360.0, "evaluate": 360.0}
    assert shown["running"] == {"stages": ["train", "evaluate"], "seconds": 600.0, "step": 30, "steps": 120}
    lines = [str(line) for line in render_status({"champion": None, "findings": [], "nights": [shown]}).renderables]
    assert f"{DAY} is running: train and evaluate, step 30 of 120, for 600 s" in lines


def test_a_night_of_another_machine_only_runs() -> None:
    """Where nothing is known of its progress, the night is shown as the journal has it, running."""
    plain = {"date": str(DAY), "state": "running", "seconds": {}}

    assert under_way(plain, {}, at(4)) == {**plain, "running": {"stages": [], "seconds": 0.0}}


def test_the_usual_time_is_the_median_of_nights_that_ran_through() -> None:
    """A night that needed a second attempt says nothing of the usual time; old nights count with their stages' sum."""
    records = [night(1, 60), night(2, 500, attempts=2), night(3, None)]

    assert usual_seconds(records) == pytest.approx((3600 + 2400) / 2)
    assert usual_seconds([]) is None


@pytest.mark.parametrize(
    ("now", "told", "expected"),
    [
        (at(4, 30), None, None),
        (at(5, 40), None, "would be, if it started now, done at 06:40"),
        (at(5, 0), {"train": {"started_us": at(4, 30), "running": 1}}, None),
        (at(6, 20), {"ingest": {"started_us": at(4, 30), "running": 1}}, "will be done at 06:50"),
        (at(5, 50), {"ingest": {"started_us": at(5, 45), "running": 1}}, "will be done at 06:45"),
        (at(7), None, None),
    ],
    ids=["in-time", "not-started", "on-its-way", "slow-stage", "late-start", "missed"],
)
def test_a_night_that_will_miss_its_time_is_forecast(
    now: int, told: dict[str, dict[str, int]] | None, expected: str | None
) -> None:
    """An hour a night, promised for 06:30: what starts or hangs too late will miss it; afterwards it is no forecast."""
    promise = Promise(ready_by="06:30", zone="UTC", now_us=now)

    found = forecast([night(n, 60) for n in (1, 2, 3)], DAY, promise, told)

    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found["level"], found["where"]) == ("warning", f"{DAY} forecast")
        assert f"night {DAY} {expected}, after 06:30 (nightly.ready_by)" in found["message"]
        assert "a night takes 60 min" in found["message"]


def test_a_finished_night_is_not_forecast() -> None:
    """The night of the day is done."""
    promise = Promise(ready_by="06:30", zone="UTC", now_us=at(5, 40))
    records = [night(n, 60 + timedelta(minutes=n).seconds / 60) for n in (1, 2, 3, 4)]

    assert forecast(records, DAY, promise, None) is None
