"""What is told of a backfill: a line for each of its days, and one message where a day stopped it. Values in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date as Date
from typing import Any

NOT_STARTED = "not started"


def day_rows(
    days: Sequence[Date], nights: Sequence[Mapping[str, Any]], error: BaseException | None = None
) -> list[dict[str, str]]:
    """Return one row a day: date, state, gate, version, parent and reasons, as text.

    Args:
        days: All days of the backfill, in order.
        nights: Objects of the nights that are done, in the same order.
        error: What the day after them failed with; None: nothing failed.
    """
    rows = [
        {
            "date": str(night["date"]),
            "state": str(night.get("state", "")),
            "gate": str(night.get("gate", "")),
            "version": _number(night.get("version")),
            "parent": _number(night.get("parent")),
            "reasons": "; ".join(night.get("reasons") or []),
        }
        for night in nights
    ]
    for place, day in enumerate(days[len(nights) :]):
        failed = place == 0 and error is not None
        told = f"{type(error).__name__}: {error}" if failed else ""
        state = "failed" if failed else NOT_STARTED
        rows.append({"date": str(day), "state": state, "gate": "-", "version": "-", "parent": "-", "reasons": told})
    return rows


def stopped_message(days: Sequence[Date], nights: Sequence[Mapping[str, Any]], error: BaseException) -> str:
    """Return why a backfill stopped, which days are done, which were not started, and what to do."""
    place = len(nights)
    done = ", ".join(f"{night['date']} {night.get('gate', '')}".strip() for night in nights) or "none"
    left = ", ".join(map(str, days[place + 1 :])) or "none"
    told = str(error) if getattr(error, "message", None) else f"{type(error).__name__}: {error}"
    return (
        f"backfill stopped at {days[place]}, day {place + 1} of {len(days)}: {told}; done: {done}; {NOT_STARTED}: {left}; "
        "mend it and run the same backfill again, which passes over what is done"
    )


def _number(value: Any) -> str:
    return "-" if value is None else str(value)
