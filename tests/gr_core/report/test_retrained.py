"""What status says of a full retrain while it runs, when it was broken off, and when it was held; and of drift."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from rich.console import Console

from gr_core.lake.entries import Entry
from gr_core.report.status import build_status, render_status

DAY = 86_400_000_000
KEY = "2025-06-04+full-retrain"
BOUND = {"commit": 4, "cutoff_us": 5 * DAY, "shown_before_us": {"click": 5 * DAY}, "delta_version": 9}


def opened(key: str, mode: str, day: str) -> tuple[str, str, dict[str, Any]]:
    pins = {"date": day, "mode": mode, "parent": None, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
    more = {"bound": BOUND, "erasures": 0} if mode == "full_retrain" else {}
    return ("opened", key, {**pins, "config": {"source": {"actions": []}}, **more})


def window(number: int, state: str, recipe: str = "r") -> tuple[str, str, dict[str, Any]]:
    told = {"number": number, "of": 2, "through": f"2025-06-0{2 * number}", "recipe": recipe, "bound": BOUND}
    counts = {"counts": {"due": 10, "train": 9, "due_holdout": 1}} if state == "trained" else {}
    return ("window", KEY, {**told, "state": state, **counts})


def status(*more: tuple[str, str, dict[str, Any]], retraining: str | None = None, drift: Any = None) -> dict[str, Any]:
    """Return the status of a home with one finished night and a full retrain."""
    done = {"state": "completed", "bound": BOUND, "status": {"drift": drift} if drift else {}}
    rows = [opened("2025-06-04", "nightly", "2025-06-04"), ("finished", "2025-06-04", done), *more]
    entries = [
        Entry(seq=n, at_us=n * 1_000_000, kind=kind, night=night, payload=payload)
        for n, (kind, night, payload) in enumerate(rows, 1)
    ]
    return build_status(entries, today=date(2025, 6, 5), retraining=retraining)


STARTED = (opened(KEY, "full_retrain", "2025-06-04"), window(1, "started"), window(1, "trained"), window(2, "started"))


def test_a_running_full_retrain_tells_its_window() -> None:
    """The object has every window as it stands; the finding says which one is trained, and is no warning."""
    found = status(*STARTED, retraining=KEY)
    (shown,) = [night for night in found["nights"] if night["mode"] == "full_retrain"]

    assert (shown["date"], shown["state"]) == ("2025-06-04", "running")
    assert [(one["number"], one["state"], one["supervised_events"]) for one in shown["windows"]] == [
        (1, "trained", 9),
        (2, "started", 0),
    ]
    (finding,) = found["findings"]
    assert finding["level"] == "info"
    assert "is running: window 2 of 2, through 2025-06-04" in finding["message"]


def test_one_that_caught_up_stands_under_the_day_that_its_data_ends_at() -> None:
    """After the night whose events it read, with both days; a window of a recipe that was given up counts for nothing."""
    night = (opened("2025-06-05", "nightly", "2025-06-05"),)
    done = ("finished", KEY, {"state": "completed", "bound": BOUND, "status": {}})
    given_up = window(9, "trained", recipe="old")
    found = status(
        opened(KEY, "full_retrain", "2025-06-04"), given_up, *night, *STARTED[1:], window(3, "trained"), done
    )

    assert [(one["date"], one.get("through")) for one in found["nights"]] == [
        ("2025-06-04", None),
        ("2025-06-05", None),
        ("2025-06-04", "2025-06-06"),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_status(found))
    assert "2025-06-06 (full retrain of 2025-06-04)" in capture.get()


def test_one_whose_process_is_gone_is_a_warning() -> None:
    """Broken off in its second window, and what takes it up again."""
    (finding,) = status(*STARTED)["findings"]

    assert finding["level"] == "warning"
    assert "broken off (window 2 of 2, through 2025-06-04)" in finding["message"]
    assert "daybreak full-retrain --through 2025-06-04" in finding["message"]


def test_windows_of_a_recipe_that_was_given_up_are_not_shown() -> None:
    """After a changed config the windows begin anew."""
    found = status(*STARTED, window(1, "started", recipe="other"), retraining=KEY)
    (shown,) = [night for night in found["nights"] if night["mode"] == "full_retrain"]

    assert [(one["number"], one["state"]) for one in shown["windows"]] == [(1, "started")]


@pytest.mark.parametrize("decision", ["hold", "promote"])
def test_the_outcome_of_a_finished_one(decision: str) -> None:
    """Held it is a warning with the gate's reasons, promoted the table says all."""
    decided = {"decision": decision, "reasons": ["gate.ne.click: worse"], "version": 7, "previous": 1}
    registered = {"version": 7, "checkpoint": "c", "vocabulary": "v", "watermark": BOUND, "date": "2025-06-04"}
    done = {"state": "completed", "bound": BOUND, "status": {}}
    more = (("registered", KEY, registered), ("decided", KEY, decided), ("finished", KEY, done))
    messages = [one["message"] for one in status(*STARTED, window(2, "trained"), *more)["findings"]]

    held = [message for message in messages if "full retrain" in message]
    assert held == (
        ["full retrain through 2025-06-04 was held by the gate: gate.ne.click: worse"] if decision == "hold" else []
    )


def test_triggers_of_the_newest_night_are_findings() -> None:
    """Each trigger is one, with its figures."""
    drift = {"figures": {}, "metrics": {}, "triggers": [{"kind": "ne", "message": "next-day NE is +12.0%"}]}

    assert [one["message"] for one in status(drift=drift)["findings"]] == ["drift: next-day NE is +12.0%"]
