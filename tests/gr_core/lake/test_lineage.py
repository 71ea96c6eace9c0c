"""Retractions in the journal: what they taint, who is champion then, and what the nights' status says."""

from __future__ import annotations

from typing import Any

import pytest

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import champion, nights, previous
from gr_core.lake.lineage import Lineage, tainted
from gr_core.refs import Bound

Row = tuple[str, str, dict[str, Any]]


def bound(commit: int) -> dict[str, Any]:
    return Bound(commit=commit, cutoff_us=10 * commit, shown_before_us={"click": 10 * commit}).to_json()


def night(date: str, version: int, parent: int | None, *, decision: str = "promote", end: bool = True) -> list[Row]:
    """Return the entries of a night that registers a version; its commit has the same number."""
    pinned = None if parent is None else {"version": parent, "checkpoint": f"ck{parent}", "watermark": bound(parent)}
    opened = {"date": date, "mode": "nightly", "parent": pinned, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
    rows: list[Row] = [
        ("opened", date, opened),
        ("registered", date, {"version": version, "checkpoint": f"ck{version}", "watermark": bound(version)}),
        ("decided", date, {"decision": decision, "reasons": [decision], "version": version, "previous": parent}),
    ]
    return rows + ([("finished", date, {"state": "completed", "bound": bound(version)})] if end else [])


def retracted(date: str, commit: int, bad: list[int], next_parent: int | None) -> Row:
    payload = {"commits": [commit], "date": date, "reason": "poison", "rows": 1, "restored": 0, "kept": 0}
    return ("retracted", date, {**payload, "tainted": bad, "previous": None, "next_parent": next_parent})


def book(*rows: Row) -> list[Entry]:
    return [
        Entry(seq=n, at_us=n, kind=kind, night=key, payload=payload)
        for n, (kind, key, payload) in enumerate(rows, start=1)
    ]


THREE = [*night("06-01", 1, None), *night("06-02", 2, 1), *night("06-03", 3, 2)]


def best(entries: list[Entry]) -> int | None:
    found = champion(entries)
    return found.version if found else None


def test_the_champion_gives_way_to_its_newest_untainted_ancestor() -> None:
    """A chain of promoted nights goes back to before the retracted one, as a rollback."""
    entries = book(*THREE, retracted("06-02", 2, [2, 3], 1))

    found = champion(entries)
    assert found is not None
    assert (found.version, found.kind) == (1, "rollback")
    assert found.reasons == ("commit 2 was retracted: poison",)
    assert previous(entries) is None
    assert tainted(entries) == {2, 3}


def test_without_an_untainted_ancestor_there_is_no_champion() -> None:
    """The next night is a first night."""
    entries = book(*THREE, retracted("06-01", 1, [1, 2, 3], None))

    assert champion(entries) is None
    assert previous(entries) is None


def test_a_held_ancestor_may_come_next() -> None:
    """The newest untainted ancestor counts, whether or not it ever was champion; others that were do not."""
    rows = [
        *night("06-01", 1, None),
        *night("06-02", 2, 1, decision="hold"),
        *night("06-03", 3, 1),
        *night("06-04", 4, 2),
    ]
    entries = book(*rows, retracted("06-04", 4, [4], 2))

    assert best(entries) == 2
    assert Lineage.of(entries).untainted(4) == 2


def test_an_untainted_champion_stays_and_the_one_before_it_may_not() -> None:
    """What a rollback goes to is never tainted."""
    rows = [*night("06-01", 1, None), *night("06-02", 2, 1), *night("06-03", 3, 1)]
    entries = book(*rows, retracted("06-02", 2, [2], 3))

    assert best(entries) == 3
    before = previous(entries)
    assert before is not None
    assert before.version == 1


@pytest.mark.parametrize(
    "after",
    [
        [("promoted", "06-03", {"version": 3, "previous": 1, "reason": "an operator"})],
        night("06-04", 4, 3),
        [("rollback", "06-04", {"version": 2, "previous": 1, "reason": "an operator"})],
    ],
    ids=["promoted by hand", "a descendant", "rolled back to"],
)
def test_what_is_tainted_never_becomes_champion_again(after: list[Row]) -> None:
    """By hand or by the gate of a night that started from it."""
    entries = book(*THREE, retracted("06-02", 2, [2, 3], 1), *after)

    assert best(entries) == 1


def test_taint_reaches_descendants_however_far() -> None:
    """Versions that the retraction does not name are tainted through their parents."""
    entries = book(*THREE, *night("06-04", 4, 3), retracted("06-02", 2, [2], 1))

    assert tainted(entries) == {2, 3, 4}
    assert Lineage.of(entries).descendants([3]) == {3, 4}
    assert best(entries) == 1


def test_finished_nights_stay_finished_and_say_why() -> None:
    """The retracted night and the nights of tainted versions get a reason; nothing else of them changes."""
    before, after = nights(book(*THREE)), nights(book(*THREE, retracted("06-02", 2, [2, 3], 1)))

    assert after["06-01"] == before["06-01"]
    assert after["06-02"].is_finished
    assert after["06-02"].reasons == ("promote", "commit 2 was retracted: poison; its version 2 is tainted")
    assert after["06-03"].reasons == ("promote", "version 3 is tainted, commit 2 was retracted: poison")
    assert (after["06-03"].decision, after["06-03"].version) == ("promote", 3)


def test_an_attempt_may_pin_another_parent() -> None:
    """An unfinished night that started from a tainted version is of the new parent's lineage from then on."""
    pinned = {"version": 1, "checkpoint": "ck1", "watermark": bound(1)}
    rows = [
        *THREE,
        *night("06-04", 4, 3, end=False),
        retracted("06-02", 2, [2, 3], 1),
        ("attempt", "06-04", {"fingerprint": "f", "difference": {}, "parent": pinned}),
        ("attempt", "06-04", {"fingerprint": "f", "difference": {}}),
        ("registered", "06-04", {"version": 5, "checkpoint": "ck5", "watermark": bound(4)}),
        ("decided", "06-04", {"decision": "promote", "reasons": [], "version": 5, "previous": 1}),
    ]
    entries = book(*rows)

    record = nights(entries)["06-04"]
    assert (record.parent_version, record.parent_checkpoint) == (1, "ck1")
    assert record.pinned_parent == pinned
    assert tainted(entries) == {2, 3, 4}
    assert best(entries) == 5


def test_the_commit_of_a_bootstrap_belongs_to_no_night() -> None:
    """Its retraction taints and moves the champion all the same."""
    entries = book(*THREE, retracted("bootstrap", 1, [1, 2, 3], None))

    assert champion(entries) is None
    assert set(nights(entries)) == {"06-01", "06-02", "06-03"}


def test_the_root_is_the_newest_full_retrain_or_a_version_without_a_parent() -> None:
    """A lineage counts its losses from its root: at first the first night's version, then each full retrain's."""
    retrained = [
        (kind, key, {**payload, "mode": "full_retrain"} if kind == "opened" else payload)
        for kind, key, payload in night("06-03", 3, 2)
    ]
    lineage = Lineage.of(book(*night("06-01", 1, None), *night("06-02", 2, 1), *retrained, *night("06-04", 4, 3)))

    assert [lineage.root(version) for version in (None, 1, 2, 3, 4)] == [None, 1, 1, 3, 3]
