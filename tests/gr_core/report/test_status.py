"""Example 7 from the entries of example 1, and the findings that stand beside it."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gr_core.config import load_config
from gr_core.lake.entries import Entry
from gr_core.lake.journal import Journal
from gr_core.report.status import Promise, build_status, render_status
from gr_core.stages import outcome

HOUR = 3_600_000_000
DAY = 24 * HOUR
JUNE_1 = 1_748_736_000_000_000  # 2025-06-01T00:00Z
SECONDS = {"ingest": 0.4, "sequences": 0.2, "pack": 0.1, "evaluate": 0.3, "train": 1.0, "register": 0.8, "gate": 0.3}
HELD = "gate.ne.click: upper bound +0.021 relative, margin +0.010"


def metrics(auc: float | None, ne: float | None, count: int, positives: int) -> dict[str, Any]:
    return {"auc": auc, "ne": ne, "count": count, "positives": positives}


# Each: day; parent; decision with its reason; the rows read to quarantined; the events; next_day; attempts.
NIGHTS: list[tuple[Any, ...]] = [
    ("2025-06-01", None, "promote", "first model", (3, 2, 0, 1), (1, 1, 1, 0), metrics(None, None, 0, 0), 1),
    ("2025-06-02", 1, "hold", HELD, (3, 2, 1, 0), (2, 2, 2, 0), metrics(1.0, 0.6258, 2, 1), 2),
    ("2025-06-03", 1, "promote", "gate passed", (5, 3, 1, 1), (6, 5, 4, 1), metrics(None, None, 4, 0), 1),
    ("2025-06-04", 1, "promote", "gate passed", (1, 1, 0, 0), (7, 6, 1, 1), metrics(None, None, 1, 1), 1),
]


def example_entries() -> list[Entry]:
    """The journal that the four nights of example 1 leave, the rollback of 06-04 08:00 among them."""
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for version, (day, parent, decision, reason, counts, events, scored, attempts) in enumerate(NIGHTS, start=1):
        if version == 4:
            rows.append(("rollback", day, {"version": 1, "previous": 3, "reason": "rolled back by an operator"}))
        started = (
            None
            if parent is None
            else {"version": parent, "checkpoint": "ck", "watermark": {"commit": 1, "cutoff_us": 0}}
        )
        pins = {"date": day, "mode": "nightly", "parent": started, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
        watermark = {"commit": version, "cutoff_us": version}
        rows.append(("opened", day, pins))
        rows += [("attempt", day, {"fingerprint": "f", "difference": {}})] * (attempts - 1)
        rows.append(("registered", day, {"version": version, "checkpoint": f"ck{version}", "watermark": watermark}))
        rows.append(
            ("decided", day, {"decision": decision, "reasons": [reason], "version": version, "previous": parent})
        )
        status = {
            "rows": dict(zip(("read", "committed", "duplicates", "quarantined"), counts, strict=True))
            | {"forgotten": 0},
            **dict(zip(("due_events", "supervised_events", "new_events", "holdout_events"), events, strict=True)),
            "late_events": 0,
            "next_day": {"click": scored | {"log_loss": None, "ece": None}},
            "seconds": SECONDS,
            "mlflow": "not a key of example 7",
        }
        rows.append(("finished", day, {"state": "completed", "bound": watermark, "status": status}))
    return entries(rows)


def entries(rows: list[tuple[str, str, dict[str, Any]]]) -> list[Entry]:
    return [
        Entry(seq=n, at_us=JUNE_1 + n * HOUR, kind=kind, night=night, payload=payload)
        for n, (kind, night, payload) in enumerate(rows, start=1)
    ]


def expected_night(version: int) -> dict[str, Any]:
    day, parent, decision, reason, rows, events, scored, attempts = NIGHTS[version - 1]
    return {
        "date": day,
        "mode": "nightly",
        "state": "completed",
        "version": version,
        "parent": parent,
        "gate": "promoted" if decision == "promote" else "held",
        "reasons": [reason, *(["rolled back by an operator"] if version == 3 else [])],
        "rows": dict(zip(("read", "committed", "duplicates", "quarantined"), rows, strict=True)) | {"forgotten": 0},
        **dict(zip(("due_events", "supervised_events", "new_events", "holdout_events"), events, strict=True)),
        "late_events": 0,
        "next_day": {"click": scored},
        "seconds": SECONDS,
        "attempts": attempts,
    }


def test_the_object_of_example_7():
    """The four nights of example 1 give exactly the object of example 7, keys and all."""
    found = build_status(example_entries(), today=date(2025, 6, 5), supervised=["click"])

    assert found == {
        "champion": {"version": 4, "date": "2025-06-04", "age_days": 1},
        "findings": [],
        "nights": [expected_night(version) for version in (1, 2, 3, 4)],
    }
    assert sum(night["rows"]["committed"] for night in found["nights"]) == 8
    assert sum(night["new_events"] for night in found["nights"]) == 8


def test_what_a_night_sampled_is_counted_apart():
    """Replayed and sampled-out events stand beside the counts of example 7, in the nights that sampled alone."""
    rows = example_entries()
    rows[-1].payload["status"] |= {"replayed_events": 40, "sampled_out_events": 7}

    nights = build_status(rows, today=date(2025, 6, 5), supervised=["click"])["nights"]

    assert nights[3] == expected_night(4) | {"replayed_events": 40, "sampled_out_events": 7}
    assert nights[2] == expected_night(3)


def opened(day: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    source = {"actions": [{"name": "click"}, {"name": "like"}, {"name": "hate", "supervise": False}]}
    pins = {"date": day, "mode": "nightly", "parent": None, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
    return ("opened", day, {**pins, "config": {"source": source}, **more})


def test_an_empty_journal_has_no_champion():
    """Before the first night there is nothing, and nothing is wrong."""
    assert build_status([], today=date(2025, 6, 5)) == {"champion": None, "findings": [], "nights": []}


def test_a_running_night_has_every_key():
    """A night under way shows zeros for what it has not written yet, per supervised action of its config."""
    night = build_status(entries([opened("2025-06-01")]), today=date(2025, 6, 2), running="2025-06-01")["nights"][0]

    assert list(night) == list(expected_night(1))
    assert (night["state"], night["gate"], night["version"], night["attempts"]) == ("running", "none", None, 1)
    assert night["rows"] == dict.fromkeys(("read", "committed", "duplicates", "quarantined", "forgotten"), 0)
    assert night["next_day"] == {"click": metrics(None, None, 0, 0), "like": metrics(None, None, 0, 0)}
    assert set(night["seconds"]) == set(SECONDS)


def test_an_interrupted_night_is_a_finding():
    """A night whose process is gone (no lock) is shown as failed, although the journal could not be told."""
    found = build_status(entries([opened("2025-06-01")]), today=date(2025, 6, 2))

    assert found["nights"][0]["state"] == "failed"
    assert [finding["level"] for finding in found["findings"]] == ["error"]
    assert "daybreak nightly --date 2025-06-01" in found["findings"][0]["message"]


@pytest.mark.parametrize("kind", ["failed", "cancelled"])
def test_a_failed_newest_night_is_a_finding(kind):
    """Case A20: without any alert configured, status itself shows the failed night and the stale champion."""
    rows = [(e.kind, e.night, e.payload) for e in example_entries()]
    rows += [opened("2025-06-05"), (kind, "2025-06-05", {"stage": "train", "error": "killed"})]
    found = build_status(entries(rows), today=date(2025, 6, 8))

    assert found["nights"][-1]["reasons"] == [f"{kind} in train: killed"]
    assert [finding["where"] for finding in found["findings"]] == ["2025-06-05", "champion"]
    assert "champion 4 of 2025-06-04 is 4 days old" in found["findings"][1]["message"]


def test_a_held_newest_night_is_a_finding():
    """The newest night was held: status says so with the gate's reason, unless an operator promoted it since."""
    held = example_entries()[: 4 + 5]
    rows = [(e.kind, e.night, e.payload) for e in held]
    moved = ("promoted", "2025-06-02", {"version": 2, "previous": 1, "reason": "promoted by an operator"})

    assert [f["message"] for f in build_status(held, today=date(2025, 6, 3))["findings"]] == [
        f"night 2025-06-02 was held by the gate: {HELD}"
    ]
    after = build_status(entries([*rows, moved]), today=date(2025, 6, 3))
    assert (after["champion"]["version"], after["findings"]) == (2, [])
    assert after["nights"][1]["gate"] == "held"


@pytest.mark.parametrize(("hour", "late"), [(3, False), (5, True)], ids=["before", "after"])
def test_a_missed_ready_by_is_a_finding(hour, late):
    """The night of the day before should be done by 04:30; before that moment it is not late yet."""
    promise = Promise(ready_by="04:30", zone="UTC", now_us=JUNE_1 + DAY + hour * HOUR)
    done = entries(
        [opened("2025-05-31"), ("finished", "2025-05-31", {"state": "no_data", "bound": None, "status": {}})]
    )
    found = build_status(done, today=date(2025, 6, 2), promise=promise)["findings"]

    assert [finding["where"] for finding in found] == (["2025-06-01"] if late else [])


def test_an_experiment_is_named_and_decides_nothing():
    """An experiment has gate none and its name, and its failure is no finding of the main line."""
    rows = [opened("2025-06-01", experiment="wide"), ("failed", "2025-06-01", {"stage": "train", "error": "x"})]
    found = build_status(entries(rows), today=date(2025, 6, 2))

    assert (found["nights"][0]["experiment"], found["nights"][0]["gate"]) == ("wide", "none")
    assert found["findings"] == []


def shown(status: dict[str, Any]) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(render_status(status))
    return captured.get()


def test_the_table_has_one_line_a_night():
    """A person sees champion, one line a night with counts, metrics and seconds, reasons and findings."""
    lines = [line.strip() for line in shown(build_status(example_entries(), today=date(2025, 6, 9))).splitlines()]
    second = next(line for line in lines if line.startswith("2025-06-02 "))

    assert "champion: version 4 of 2025-06-04, 5 days old" in lines[0]
    assert second.split() == ["2025-06-02", "completed", "held", "2", "1", "3", "2/2/2", "1.000", "/", "0.626", "3.1"]
    assert sum(line.startswith("2025-06-0") and "completed" in line for line in lines) == 4
    assert any(line.startswith("warning: champion 4") for line in lines)
    assert any("rolled back by an operator" in line for line in lines)


@pytest.mark.parametrize("kind", ["held", "failed"])
def test_a_reason_is_printed_once(kind):
    """What the finding about the newest night says is not said again; an older night keeps its line."""
    journal = example_entries()[: 4 + 5]
    reason = HELD
    if kind == "failed":
        rows = [(e.kind, e.night, e.payload) for e in journal]
        rows += [opened("2025-06-03"), ("failed", "2025-06-03", {"stage": "train", "error": "killed"})]
        journal, reason = entries(rows), "failed in train: killed"
    text = " ".join(shown(build_status(journal, today=date(2025, 6, 3))).split())

    assert text.count(reason) == 1
    assert text.count(HELD) == 1


def test_an_empty_home_says_what_to_do():
    """No table of nothing; what is found is still said."""
    empty = build_status([], today=date(2025, 6, 5))

    assert shown(empty).strip() == "no night yet; run daybreak nightly"
    late = Promise(ready_by="04:30", zone="UTC", now_us=JUNE_1 + 5 * HOUR)
    assert "was not done by 04:30" in shown(build_status([], today=date(2025, 6, 1), promise=late))


@pytest.mark.parametrize(
    ("today", "age", "head"),
    [(5, 1, "2025-06-04, 1 day old"), (4, 0, "2025-06-04, 0 days old"), (3, None, "2025-06-04")],
)
def test_a_champion_is_never_of_a_negative_age(today, age, head):
    """One day is a day; a champion dated after today has no age."""
    status = build_status(example_entries(), today=date(2025, 6, today))

    assert status["champion"]["age_days"] == age
    assert shown(status).splitlines()[0].strip() == f"champion: version 4 of {head}"


@pytest.mark.parametrize(("config", "age"), [("world", None), ("minimal", 545)])
def test_an_embedded_worlds_champion_has_no_age(tmp_path: Path, config: str, age: int | None) -> None:
    """Its days are not the calendar's: neither the head nor a finding counts from today, and any other feed's do."""
    for entry in example_entries():
        Journal(str(tmp_path / "lake" / "journal")).append(entry.kind, entry.night, entry.payload, at_us=entry.at_us)

    status = outcome.status(load_config(f"conf/{config}.toml"), str(tmp_path), date(2026, 12, 1), now_us=1)

    assert status["champion"]["age_days"] == age
    assert ("days old" in shown(status).splitlines()[0]) == (age is not None)
    assert ("champion" in [one["where"] for one in status["findings"]]) == (age is not None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [({"mode": "full_retrain"}, "2025-06-06 (full retrain)"), ({"experiment": "faster"}, "2025-06-06 (faster)")],
)
def test_a_reason_says_what_it_is_about(kind: dict[str, str], name: str) -> None:
    """A full retrain and an experiment have their night's date; the line with the reason tells them apart."""
    night = {"date": "2025-06-06", "state": "completed", "gate": "held", "reasons": [HELD], **kind}

    assert f"{name}: {HELD}" in shown({"champion": None, "findings": [], "nights": [night]})


def test_the_table_takes_nights_without_figures():
    """A night that is only known to be running elsewhere is shown, not refused."""
    bare = {"champion": None, "findings": [], "nights": [{"date": "2025-06-01", "state": "running"}]}

    assert "running" in shown(bare)
