from typing import Any

import pytest

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import bound_nights_ago, champion, finished_bounds, nights, previous, versions
from gr_core.refs import Bound


def bound(commit: int, cutoff: int) -> dict[str, Any]:
    return Bound(commit=commit, cutoff_us=cutoff, shown_before_us={"click": cutoff - 6}, delta_version=commit).to_json()


def opened(date: str, parent: int | None = None, **more: Any) -> dict[str, Any]:
    value = None if parent is None else {"version": parent, "checkpoint": f"ck{parent}", "watermark": bound(1, 20)}
    return {"date": date, "mode": "nightly", "parent": value, "cutoff_us": 20, "fingerprint": "f", "seed": 7, **more}


def book(*rows: tuple[str, str, dict[str, Any]]) -> list[Entry]:
    return [
        Entry(seq=n, at_us=100 * n, kind=kind, night=night, payload=payload)
        for n, (kind, night, payload) in enumerate(rows, start=1)
    ]


def night_rows(
    date: str, version: int, decision: str, *, parent: int | None, commit: int, cutoff: int
) -> list[tuple[str, str, dict[str, Any]]]:
    reasons = ["first model" if parent is None else "gate passed" if decision == "promote" else "held"]
    return [
        ("opened", date, opened(date, parent)),
        ("ingested", date, {"commit": commit, "delta_version": commit, "rows": {"read": 3, "committed": 3}}),
        (
            "registered",
            date,
            {"version": version, "checkpoint": f"ck{version}", "watermark": bound(commit, cutoff), "digest": "d"},
        ),
        ("decided", date, {"decision": decision, "reasons": reasons, "version": version, "previous": parent}),
        ("finished", date, {"state": "completed", "bound": bound(commit, cutoff), "status": {"due_events": 1}}),
    ]


def four_nights() -> list[Entry]:
    """Example 1: V1 promoted, V2 held, V3 promoted and rolled back, V4 promoted."""
    return book(
        *night_rows("2025-06-01", 1, "promote", parent=None, commit=1, cutoff=20),
        *night_rows("2025-06-02", 2, "hold", parent=1, commit=2, cutoff=30),
        *night_rows("2025-06-03", 3, "promote", parent=1, commit=3, cutoff=40),
        ("rollback", "2025-06-04", {"version": 1, "previous": 3, "reason": "rolled back by an operator"}),
        *night_rows("2025-06-04", 4, "promote", parent=1, commit=4, cutoff=50),
    )


def test_a_night_goes_through_its_states():
    """Running when opened, failed on an error, running again on a new attempt, completed when finished."""
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("opened", "n", opened("2025-06-01")),
        ("failed", "n", {"stage": "train", "error": "killed"}),
        ("attempt", "n", {"fingerprint": "g", "difference": {"train.clip_norm": [1.0, 2.0]}}),
        ("finished", "n", {"state": "no_data", "bound": bound(1, 20), "status": {}}),
    ]

    states = [nights(book(*rows[:end]))["n"].state for end in range(1, 5)]
    assert states == ["running", "failed", "running", "no_data"]
    failed = nights(book(*rows[:2]))["n"]
    assert (failed.stage, failed.error) == ("train", "killed")
    last = nights(book(*rows))["n"]
    assert last.is_finished
    assert [attempt["fingerprint"] for attempt in last.attempts] == ["f", "g"]
    assert (last.seed, last.cutoff_us, last.fingerprint, last.parent_version) == (7, 20, "f", None)


def test_pins_come_from_the_first_entry():
    """Parent, cutoff, seed and fingerprint are those of the night's first entry, whatever is opened later."""
    record = nights(book(("opened", "n", opened("2025-06-02", 1)), ("opened", "n", opened("2025-06-02", 5))))["n"]

    assert (record.parent_version, record.parent_checkpoint) == (1, "ck1")
    assert Bound.from_json(bound(1, 20)) == record.parent_watermark
    assert record.opened == opened("2025-06-02", 1)


def test_a_finished_night_is_immutable():
    """A forced stage or a failure after the end changes neither state, version nor bound."""
    entries = four_nights()
    before = nights(entries)["2025-06-01"]
    later = book(
        *[(e.kind, e.night, e.payload) for e in entries],
        ("attempt", "2025-06-01", {"fingerprint": "x", "difference": {}}),
        ("failed", "2025-06-01", {"stage": "train", "error": "killed"}),
        ("finished", "2025-06-01", {"state": "no_data", "bound": None, "status": {}}),
    )

    assert before == nights(later)["2025-06-01"]


def test_the_champion_follows_decisions_and_rollbacks():
    """Example 1: V1 stays through V2's hold, V3 takes over, a rollback brings V1 back, V4 takes over."""
    entries = four_nights()
    seen = []
    for end in range(len(entries) + 1):
        now, before = champion(entries[:end]), previous(entries[:end])
        step = (now.version if now else None, before.version if before else None, now.kind if now else None)
        if not seen or seen[-1] != step:
            seen.append(step)

    assert seen == [
        (None, None, None),
        (1, None, "first"),
        (3, 1, "promoted"),
        (1, None, "rollback"),
        (4, 1, "promoted"),
    ]
    now = champion(entries)
    assert now is not None
    assert (now.date, now.checkpoint, now.watermark.commit) == ("2025-06-04", "ck4", 4)
    assert {"version": 4, "checkpoint": "ck4", "watermark": bound(4, 50)} == now.as_parent()


def test_an_operator_can_promote_a_held_version():
    """`promoted` makes a held version the champion, and its night says so."""
    entries = book(
        *[(e.kind, e.night, e.payload) for e in four_nights()],
        ("promoted", "2025-06-05", {"version": 2, "previous": 4, "reason": "promoted by an operator"}),
    )
    now, before = champion(entries), previous(entries)

    assert now is not None
    assert before is not None
    assert (now.version, before.version) == (2, 4)
    assert nights(entries)["2025-06-02"].reasons == ("held", "promoted by an operator")
    assert nights(entries)["2025-06-03"].reasons == ("gate passed", "rolled back by an operator")


def test_versions_know_their_night_and_checkpoint():
    """Every registered version is found with date, checkpoint and watermark."""
    found = versions(four_nights())

    assert list(found) == [1, 2, 3, 4]
    assert (
        found[2].date,
        found[2].checkpoint,
        found[2].watermark.commit,
        found[2].digest,
    ) == ("2025-06-02", "ck2", 2, "d")


def test_finished_bounds_keep_only_what_no_other_covers():
    """A later night's bound covers the earlier ones; a backfill beside it, with other commits, stays."""
    entries = book(
        *night_rows("2025-06-01", 1, "promote", parent=None, commit=1, cutoff=20),
        *night_rows("2025-06-05", 2, "promote", parent=1, commit=2, cutoff=60),
        *night_rows("2025-06-03", 3, "hold", parent=1, commit=3, cutoff=40),
    )

    assert [(b.commit, b.cutoff_us) for b in finished_bounds(entries)] == [(2, 60), (3, 40)]
    assert [(b.commit, b.cutoff_us) for b in finished_bounds(four_nights())] == [(4, 50)]


def test_experiments_and_unfinished_nights_have_no_bound():
    """Only finished nights of the main line make events no longer new."""
    aside = ("opened", "2025-06-02+x", opened("2025-06-02", 1, experiment="x"))
    done = ("finished", "2025-06-02+x", {"state": "completed", "bound": bound(9, 90), "status": {}})
    full = ("opened", "full", opened("2025-06-02", None, mode="full_retrain"))
    done_full = ("finished", "full", {"state": "completed", "bound": bound(9, 90), "status": {}})
    entries = book(aside, done, full, done_full, ("opened", "2025-06-03", opened("2025-06-03", 1)))

    assert finished_bounds(entries) == []
    assert bound_nights_ago(entries, 1) is None


def test_bounds_are_counted_back_in_order_of_finishing():
    """K = 1 is the newest finished night; fewer nights than k give none."""
    ago = [bound_nights_ago(four_nights(), k) for k in range(1, 6)]

    assert [b.commit if b else None for b in ago] == [4, 3, 2, 1, None]
    with pytest.raises(ValueError, match="at least 1"):
        bound_nights_ago(four_nights(), 0)
