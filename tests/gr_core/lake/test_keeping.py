"""What prune keeps, as a fold over random journals: whatever the next step may be, what it needs is still there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

import tests.tiny as tiny
from gr_core.lake.entries import Entry
from gr_core.lake.keeping import delta_versions, kept
from gr_core.lake.ledger import champion, champions, nights, previous, versions
from gr_core.lake.lineage import Lineage
from gr_core.lake.pruned import Pruned
from gr_core.refs import Bound

RERUN_DAYS = 2
BOUND = Bound(commit=1, cutoff_us=0, delta_version=1, shown_before_us={}).to_json()


class Home:
    """A journal that grows as a home's does, without files."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.day = 0

    def add(self, kind: str, night: str, **payload: Any) -> None:
        """Append an entry."""
        seq = len(self.entries) + 1
        self.entries.append(Entry(seq=seq, at_us=seq, kind=kind, night=night, payload=payload))

    def open(self) -> str:
        """Open the next day's night from the champion."""
        key, best = str(tiny.FIRST_DAY + timedelta(days=self.day)), champion(self.entries)
        self.day += 1
        pins = {"cutoff_us": 0, "seed": 0, "fingerprint": ""}
        self.add("opened", key, date=key, mode="nightly", parent=best.as_parent() if best else None, **pins)
        self.add("ingested", key, commit=self.day, delta_version=self.day, rows={})
        return key

    def conclude(self, key: str, *, promote: bool) -> None:
        """Register, decide and finish a night."""
        version = 1 + max((e.payload["version"] for e in self.entries if e.kind == "registered"), default=0)
        folder = f"/h/nights/{key}"
        uris = {"checkpoint": f"{folder}/checkpoint-1", "vocabulary": f"{folder}/vocabulary-1"}
        self.add("registered", key, version=version, watermark=BOUND, **uris)
        decision = "promote" if promote else "hold"
        self.add("decided", key, decision=decision, reasons=[], version=version, previous=None)
        self.add("finished", key, state="completed", bound=None, status={})

    def step(self, what: str, number: int) -> None:
        """Do one thing that nights or operators do, where it is possible."""
        best, before, known = champion(self.entries), previous(self.entries), sorted(versions(self.entries))
        usable = [version for version in known if version not in Lineage.of(self.entries).tainted]
        match what:
            case "promoted" | "held":
                waiting = [r.key for r in nights(self.entries).values() if not r.is_finished]
                self.conclude(waiting[0] if waiting else self.open(), promote=what == "promoted")
            case "open":
                self.open()
            case "rollback" if best is not None and before is not None:
                self.add("rollback", "x", version=before.version, previous=best.version, reason="")
            case "promote" if usable:
                self.add("promoted", "x", version=usable[number % len(usable)], previous=None, reason="")
            case "retract" if known:
                bad = [known[number % len(known)]]
                parent = Lineage.of(self.entries).untainted(
                    best.version if best else None, Lineage.of(self.entries).descendants(bad)
                )
                self.add("retracted", "x", commits=[1], reason="", tainted=bad, next_parent=parent)
            case "prune":
                self.prune(1 + number % 3)

    def prune(self, keep: int) -> None:
        """Prune, and check what it must leave alone."""
        before = self.entries
        stay = kept(before, keep_versions=keep, rerun_days=RERUN_DAYS)
        gone = sorted(versions(before).keys() - stay.versions.keys())
        keys = [key for key in nights(before) if key not in stay.nights]
        self.entries = list(before)
        self.add("pruned", "prune", versions=gone, nights=keys, keep=keep)
        for look in (champion, previous):
            was, now = look(before), look(self.entries)
            assert (was and was.version) == (now and now.version)
        assert sorted(versions(before))[-keep:] == sorted(versions(self.entries))[-keep:]
        again = kept(self.entries, keep_versions=keep, rerun_days=RERUN_DAYS)
        assert stay.versions.keys() == again.versions.keys()


STEPS = st.sampled_from(["promoted", "promoted", "held", "open", "rollback", "promote", "retract", "prune", "prune"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 30)), min_size=4, max_size=30))
def test_whatever_came_before_what_the_next_step_needs_is_kept(steps: list[tuple[str, int]]) -> None:
    """Champion, previous, what open nights and repeatable ones start from, roots: none of them is ever pruned."""
    home = Home()
    for what, number in steps:
        home.step(what, number)
        gone, lineage = Pruned.of(home.entries), Lineage.of(home.entries)
        assert not {one.version for one in champions(home.entries)} & gone.versions.keys()
        records = nights(home.entries)
        newest = max((record.date for record in records.values()), default="")
        for record in records.values():
            oldest = str(tiny.FIRST_DAY.fromisoformat(newest) - timedelta(days=RERUN_DAYS))
            if not record.is_finished:
                assert record.key not in gone.nights
                assert lineage.untainted(record.parent_version) not in gone.versions
            if record.date >= oldest:
                assert record.key not in gone.nights
                assert record.parent_version not in gone.versions
                assert record.delta_version in delta_versions(home.entries, RERUN_DAYS)
        best = champion(home.entries)
        root = best.version if best else None
        while root is not None and lineage.parents.get(root) is not None:
            root = lineage.parents[root]
        assert root not in gone.versions


def test_an_open_full_retrain_keeps_what_its_entries_name() -> None:
    """The window it goes on from and the table version it reads stay, however old, also in entries of other kinds."""
    home = Home()
    home.conclude(home.open(), promote=True)
    opened = {
        "date": "2025-06-01",
        "mode": "full_retrain",
        "parent": None,
        "cutoff_us": 0,
        "seed": 0,
        "fingerprint": "",
    }
    home.add("opened", "retrain", **opened)
    home.add(
        "attempt", "retrain", fingerprint="", window={"delta_version": 77, "from": "s3://b/nights/w1/checkpoint-9"}
    )
    for _ in range(9):
        home.conclude(home.open(), promote=True)

    stay = kept(home.entries, keep_versions=1, rerun_days=RERUN_DAYS)

    assert stay.nights["retrain"] == ["full_retrain retrain is open"]
    assert stay.folders["w1", "checkpoint-9"] == ["retrain names it"]
    assert delta_versions(home.entries, RERUN_DAYS)[77] == ["retrain"]
    home.add("finished", "retrain", state="completed", bound=None, status={})
    assert 77 not in delta_versions(home.entries, RERUN_DAYS)
    assert "retrain" not in kept(home.entries, keep_versions=1, rerun_days=RERUN_DAYS).nights
