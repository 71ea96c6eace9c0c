"""What `status` tells of a night that runs: its stage, how long it takes, and when it will be done.

Values in, values out. Durations of past nights come from the journal, the running one's from gr_core.progress.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from datetime import date as Date
from typing import Any
from zoneinfo import ZoneInfo

from gr_core.lake.ledger import NightRecord
from gr_core.report.status import Promise

PAST = 7  # nights that a forecast looks at
ORDER = ("ingest", "sequences", "pack", "evaluate", "train", "register", "gate")
_SHOWN_AS = {"vocabulary": "pack", "encode": "pack"}  # stages of the flow that a night's seconds count as pack
_BESIDE = "evaluate"  # runs beside training, so it takes no time of its own


def under_way(night: Mapping[str, Any], told: Mapping[str, Mapping[str, Any]], now_us: int) -> dict[str, Any]:
    """Return a running night's object with what it does now.

    Args:
        night: Its object of example 7.
        told: What gr_core.progress has of it; empty: only that it runs.
        now_us: The moment it is asked, microseconds since the epoch.

    Returns:
        The object; `seconds` are those so far, and `running` has stages (names), seconds (since the attempt's first
        stage began), and while it trains step and steps.
    """
    if not told:
        return {**night, "running": {"stages": [], "seconds": 0.0}}
    seconds: dict[str, float] = dict(night["seconds"])
    spent: dict[str, float] = {}
    for stage, one in told.items():
        end = now_us if one.get("running") else one.get("ended_us", now_us)
        shown = _SHOWN_AS.get(stage, stage)
        spent[shown] = spent.get(shown, 0.0) + max(end - one["started_us"], 0) / 1e6
    stages = [stage for stage, one in told.items() if one.get("running")]
    begun = min(one["started_us"] for one in told.values())
    running: dict[str, Any] = {"stages": stages, "seconds": round(max(now_us - begun, 0) / 1e6, 1)}
    training = told.get("train", {})
    if "train" in stages and "steps" in training:
        running |= {"step": training["step"], "steps": training["steps"]}
    return {
        **night,
        "seconds": {**seconds, **{stage: round(value, 1) for stage, value in spent.items()}},
        "running": running,
    }


def usual_seconds(records: Sequence[NightRecord]) -> float | None:
    """Return how long a night takes: the median of the last PAST nights that ran through; None where none did.

    Nights of releases that did not write down when they ended count with the sum of their stages.
    """
    done = [r for r in records if r.is_main and r.is_finished and r.version is not None and len(r.attempts) == 1]
    return statistics.median(_took(record) for record in done[-PAST:]) if done else None


def _took(record: NightRecord) -> float:
    if record.elapsed_us is not None:
        return record.elapsed_us / 1e6
    return sum(_stages(record).values())


def _stages(record: NightRecord) -> dict[str, float]:
    seconds = (record.status or {}).get("seconds") or {}
    return {stage: float(seconds.get(stage) or 0.0) for stage in ORDER if stage != _BESIDE}


def _left(records: Sequence[NightRecord], told: Mapping[str, Mapping[str, Any]], now_us: int) -> float:
    """Return the seconds that the stages which have not ended usually take, less what the running ones have had."""
    done = [r for r in records if r.is_main and r.is_finished and r.version is not None]
    left = 0.0
    for stage in (stage for stage in ORDER if stage != _BESIDE):
        usual = statistics.median(_stages(record)[stage] for record in done[-PAST:]) if done else 0.0
        one = told.get(stage)
        if one is None:
            left += usual
        elif one.get("running"):
            left += max(usual - (now_us - one["started_us"]) / 1e6, 0.0)
    return left


def forecast(
    records: Sequence[NightRecord], day: Date, promise: Promise, told: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, str] | None:
    """Find that the night of a day will miss `ready_by`, while that moment lies ahead.

    Args:
        records: All nights, by date.
        day: The lake day.
        promise: `ready_by`, the zone, and the moment it is asked.
        told: What gr_core.progress has of the night where it runs; None: it does not, and would start now.

    Returns:
        The finding; None where the night will be in time, has finished, is past its moment (which is a finding of its
        own), or no night ever ran through.
    """
    zone = ZoneInfo(promise.zone)
    promised = datetime.combine(day + timedelta(days=1), time.fromisoformat(promise.ready_by), zone)
    now = datetime.fromtimestamp(promise.now_us / 1e6, UTC)
    usual = usual_seconds(records)
    finished = any(r.is_main and r.date == day.isoformat() and r.is_finished for r in records)
    if usual is None or finished or now > promised:
        return None
    begun = now
    if told:
        begun = datetime.fromtimestamp(min(one["started_us"] for one in told.values()) / 1e6, UTC)
    done = max(begun + timedelta(seconds=usual), now + timedelta(seconds=_left(records, told or {}, promise.now_us)))
    if done <= promised:
        return None
    what = "will be" if told is not None else "would be, if it started now,"
    message = (
        f"night {day} {what} done at {done.astimezone(zone):%H:%M}, after {promise.ready_by} (nightly.ready_by); a night "
        f"takes {usual / 60:.0f} min, the median of the last {PAST}"
    )
    return {"level": "warning", "where": f"{day} forecast", "message": message}
