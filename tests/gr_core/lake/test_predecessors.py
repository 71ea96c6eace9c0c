"""What a late day starts from and what a rollback takes out of use: on journals of any nights, moves and retractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.data.due import check_not_behind
from gr_core.lake.entries import Entry
from gr_core.lake.ledger import bound_nights_ago, champion, champions, previous, versions
from gr_core.lake.lineage import Lineage
from gr_core.lake.predecessors import held_for_lineage, is_older, out_of_use, predecessors, start_of
from gr_core.refs import Bound


class Book:
    """A journal that is written as nights and operators would write it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.seen: dict[int, frozenset[tuple[int, int]]] = {}
        """Version -> (commit, day) of what its lineage was trained on."""
        self.commits: list[int] = []
        """Day of each commit's rows, from commit 1 on."""

    def write(self, kind: str, night: str, **payload: Any) -> None:
        """Append an entry."""
        self.entries.append(Entry(seq=len(self.entries) + 1, at_us=0, kind=kind, night=night, payload=payload))

    def night(self, day: int, mode: str, decision: str, version: int) -> int | None:
        """Run a whole night; returns its parent's version."""
        parent = start_of(self.entries, name(day) if mode == "backfill" else None)
        known = versions(self.entries)
        self.commits.append(day)
        bound = Bound(commit=len(self.commits), cutoff_us=day + 1)
        watermark = known[parent].watermark if parent is not None else None
        if watermark is not None:
            check_not_behind(bound, watermark)
        rows = {(number, of) for number, of in enumerate(self.commits, 1) if of <= day}
        had = self.seen[parent] if parent is not None else frozenset()
        due = {(number, of) for number, of in rows if watermark is None or not inside(watermark, number, of)}
        assert not due & had, "trained on twice along a lineage"
        self.seen[version] = had | due
        assert self.seen[version] == rows, "inside the bound, but never trained on"
        pinned = None if parent is None else {"version": parent, "checkpoint": "c", "watermark": bound.to_json()}
        pins = {"date": name(day), "mode": mode, "parent": pinned, "cutoff_us": day + 1, "fingerprint": "f", "seed": 0}
        self.write("opened", name(day), **pins)
        self.write("registered", name(day), version=version, checkpoint="c", watermark=bound.to_json())
        best = champion(self.entries)
        held = (best is not None and name(day) <= best.date) or held_for_lineage(self.entries, parent)
        said = "hold" if held else decision  # as eval.gate and stages.gating have it
        self.write("decided", name(day), decision=said, reasons=["r"], version=version, previous=best and best.version)
        self.write("finished", name(day), state="completed", bound=bound.to_json(), status={})
        return parent


def inside(bound: Bound, commit: int, day: int) -> bool:
    """Tell whether a commit's rows of a day are inside a bound."""
    return commit <= bound.commit and day < bound.cutoff_us


def name(day: int) -> str:
    """Return a lake day."""
    return f"2025-06-{day + 1:02d}"


kinds = ["nightly", "nightly", "nightly", "backfill", "backfill", "backfill", "rollback", "promote", "retract"]
steps = st.lists(
    st.tuples(st.sampled_from(kinds), st.integers(0, 8), st.sampled_from([True, True, False])), min_size=6, max_size=16
)


@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_late_days_between_nights_move_no_champion_and_teach_nothing_twice(
    steps: Sequence[tuple[str, int, bool]],
) -> None:
    """Nights, backfills of any days, rollbacks, promotions and retractions in any order.

    A late day starts from the nearest night before it that nothing tainted, and the champion stays; a day after the
    champion's starts from the champion as it is then; along every lineage each row is trained on once.
    """
    book, done = Book(), set()
    for version, (what, number, yes) in enumerate(steps, 1):
        before = champion(book.entries)
        if what in ("nightly", "backfill"):
            late = is_older(book.entries, name(number))
            if number in done or (what == "nightly" and late):
                continue  # finished; or refused, since a bound never moves back
            tainted = Lineage.of(book.entries).tainted
            started = book.night(number, what, "promote" if yes else "hold", version)
            done.add(number)
            after = champion(book.entries)
            if late:
                assert (after and after.seq) == (before and before.seq), "a late day moved the champion"
                known = versions(book.entries[:-4])
                fit = [one for one in known.values() if one.date < name(number) and one.version not in tainted]
                nearest = max(fit, key=lambda one: one.date, default=None)
                assert started == (nearest.version if nearest else None)
            else:
                assert started == (before.version if before else None)
        elif what == "rollback" and previous(book.entries):
            to = previous(book.entries)
            assert to is not None
            assert before is not None
            book.write("rollback", to.model.night, version=to.version, previous=before.version, reason="worse")
            stood = {one.version for one in champions(book.entries)} | ancestors(book, to.version)
            assert (before.version in out_of_use(book.entries)) is (before.version not in stood)
        elif what == "promote" and versions(book.entries):
            fit = sorted(versions(book.entries).keys() - Lineage.of(book.entries).tainted)
            if fit:
                chosen = fit[number % len(fit)]
                book.write("promoted", "x", version=chosen, previous=before and before.version, reason="by hand")
                assert held_for_lineage(book.entries, chosen) == []
        elif what == "retract" and versions(book.entries):
            retract(book, number)
        best = champion(book.entries)
        assert best is None or held_for_lineage(book.entries, best.version) == []


def ancestors(book: Book, version: int | None) -> set[int]:
    """Return a version and all that it was warm-started from."""
    parents, found = Lineage.of(book.entries).parents, set()
    while version is not None:
        found.add(version)
        version = parents.get(version)
    return found


def retract(book: Book, number: int) -> None:
    """Taint a version and its descendants; the champion gives way to its newest untainted ancestor."""
    lineage, best = Lineage.of(book.entries), champion(book.entries)
    roots = sorted(versions(book.entries))
    tainted = lineage.descendants([roots[number % len(roots)]])
    clean = lineage.untainted(best.version if best else None, tainted)
    told = {"commits": [1], "reason": "bots", "tainted": sorted(tainted), "next_parent": clean}
    book.write("retracted", "x", previous=best and best.version, **told)


def night(book: Book, day: int, version: int, decision: str = "promote", mode: str = "nightly") -> int | None:
    """Run a night of a book."""
    return book.night(day, mode, decision, version)


def test_a_rollback_takes_what_it_passes_over_out_of_use_until_a_promotion_brings_it_back() -> None:
    """All champions above the one gone back to are out; so is what started from them, whatever the gate measured."""
    book = Book()
    for version in (1, 2, 3):
        night(book, version, version)
    night(book, 4, 4, "hold")
    book.write("rollback", name(1), version=1, previous=3, reason="clicks fell")

    assert out_of_use(book.entries) == {2: "clicks fell", 3: "clicks fell"}
    assert held_for_lineage(book.entries, 4) == [
        "gate.lineage: it was warm-started from version 3, which was rolled back (clicks fell)"
    ]
    assert held_for_lineage(book.entries, 1) == held_for_lineage(book.entries, None) == []

    book.write("promoted", name(3), version=3, previous=1, reason="by hand")
    assert out_of_use(book.entries) == {}
    assert [one.version for one in champions(book.entries)] == [1, 3]


def test_a_late_day_is_no_night_ago() -> None:
    """The gate's window counts nights that went on; what a late day had new is inside it all the same."""
    book = Book()
    for day, version in ((5, 1), (6, 2)):
        night(book, day, version)
    night(book, 2, 3, mode="backfill")
    found = [bound_nights_ago(book.entries, k) for k in (1, 2, 3)]

    assert [bound and bound.cutoff_us for bound in found] == [7, 6, None]


def test_a_late_day_passes_over_nights_that_left_no_model() -> None:
    """A night without data has no version; the nearest one before it has."""
    book = Book()
    night(book, 0, 1)
    pins = {"date": name(1), "mode": "nightly", "parent": None, "cutoff_us": 2, "fingerprint": "f", "seed": 0}
    book.write("opened", name(1), **pins)
    book.write("finished", name(1), state="no_data", bound=None, status={})
    night(book, 5, 2)

    assert [one.version for one in predecessors(book.entries, name(2))] == [1]
    assert predecessors(book.entries, name(0)) == []
    assert night(book, 2, 3, mode="backfill") == 1
    assert night(book, 3, 4, mode="backfill") == 3
