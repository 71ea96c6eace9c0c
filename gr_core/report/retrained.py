"""What `daybreak status` says of full retrains: their windows, and a finding while one runs, was broken off or was held."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date as Date
from typing import Any

from gr_core.lake.ledger import NightRecord

MODE = "full_retrain"
TOLD_DAYS = 7
"""A held full retrain is a finding until nights are so many days past it."""


def windows(record: NightRecord) -> list[dict[str, Any]]:
    """Return a full retrain's windows as they stand: number, of, through, state, due_events and supervised_events.

    Windows of a recipe that was given up (another config, rows removed since) are left out.
    """
    recipe = record.windows[-1]["recipe"] if record.windows else None
    found: dict[int, dict[str, Any]] = {}
    for one in record.windows:
        if one["recipe"] == recipe:
            counts = one.get("counts") or {}
            told = {key: one[key] for key in ("number", "of", "through", "state")}
            found[one["number"]] = {
                **told,
                "due_events": counts.get("due", 0),
                "supervised_events": counts.get("train", 0),
            }
    return list(found.values())


def through(record: NightRecord) -> str:
    """Return the last lake day that a night's version covers: of a full retrain that caught up, its last trained window's."""
    trained = [one["through"] for one in windows(record) if one["state"] == "trained"]
    return str(max([record.date, *trained]))


def progress(record: NightRecord) -> str:
    """Return how far a full retrain has come, for a person."""
    told = windows(record)
    if not told:
        return "its vocabulary is being counted"
    last = told[-1]
    where = f"window {last['number']} of {last['of']}" if last["number"] <= last["of"] else "catching up"
    return f"{where}, through {last['through']}" + (", is trained" if last["state"] == "trained" else "")


def findings(records: Sequence[NightRecord], retraining: str | None) -> list[dict[str, str]]:
    """Tell of the newest full retrain: that it runs, was broken off, or was held lately.

    Args:
        records: All nights, by date.
        retraining: Key of the full retrain that a live process works on.
    """
    newest = next((r for r in sorted(records, key=lambda r: r.opened_us, reverse=True) if r.mode == MODE), None)
    if newest is None:
        return []
    name = f"full retrain through {newest.date}"
    if newest.is_finished:
        nights = [r.date for r in records if r.is_main and r.is_finished]
        past = (Date.fromisoformat(max(nights, default=newest.date)) - Date.fromisoformat(newest.date)).days
        if newest.decision != "hold" or past > TOLD_DAYS:
            return []
        return [_finding("warning", newest.key, f"{name} was held by the gate: {'; '.join(newest.reasons)}")]
    if newest.key == retraining:
        return [_finding("info", newest.key, f"{name} is running: {progress(newest)}")]
    why = newest.error or "interrupted, its process is gone"
    again = f"the next night's end takes it up again, or `daybreak full-retrain --through {newest.date}`"
    return [_finding("warning", newest.key, f"{name} was broken off ({progress(newest)}): {why}; {again}")]


def _finding(level: str, where: str, message: str) -> dict[str, str]:
    return {"level": level, "where": where, "message": message}


def drift_findings(records: Sequence[NightRecord]) -> list[dict[str, str]]:
    """Tell of the drift of the newest finished night of the main line that calls for a full retrain."""
    newest = next((r for r in reversed(records) if r.is_main and r.is_finished), None)
    drifted = (newest.status or {}).get("drift") if newest is not None else None
    asked = ((newest.opened.get("config") or {}).get("drift") or {}).get("retrain") if newest is not None else None
    if newest is None or not drifted or asked == "off":
        return []
    return [_finding("warning", f"{newest.key} drift", f"drift: {one['message']}") for one in drifted["triggers"]]
