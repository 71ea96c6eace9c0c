"""The bound of a night, and which (event, action)s are due and new."""

from datetime import UTC, datetime

import polars as pl
import pytest

from gr_core.data.due import check_not_behind, due_mask, inside_mask, make_bound, new_mask, outermost
from gr_core.errors import BoundError
from gr_core.refs import Bound
from tests.feeds import windowed

HOUR = 3600
US = 1_000_000


def at(day: int, hour: int = 0) -> int:
    return round(datetime(2025, 6, day, hour, tzinfo=UTC).timestamp()) * US


def table(rows: list[tuple[str, int, int]], known: int = 1) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "event_id": [row[0] for row in rows],
            "commit": pl.Series([row[1] for row in rows], dtype=pl.Int64),
            "shown_at": pl.Series([row[2] for row in rows], dtype=pl.Datetime("us", "UTC")),
            "known": pl.Series([known] * len(rows), dtype=pl.Int32),
        }
    )


def chosen(frame: pl.DataFrame, mask: pl.Expr, *, without: str = "-") -> list[str]:
    return frame.filter(mask != 0, ~pl.col("event_id").str.starts_with(without))["event_id"].sort().to_list()


# Examples, section 1: event, commit, shown_at.
EVENTS = [
    ("e1", 1, at(1, 10)),
    ("e2", 1, at(1, 20)),
    ("e3", 2, at(2, 9)),
    ("e5", 2, at(2, 18)),
    ("e4", 3, at(1, 12)),
    ("e6", 3, at(3, 10)),
    ("h1", 3, at(3, 11)),
    ("e7", 4, at(4, 10)),
]


@pytest.mark.parametrize(
    ("day", "parent_day", "due", "supervised", "new"),
    [
        (1, None, "e1", "e1", "e1"),
        (2, 1, "e2 e3", "e2 e3", "e2 e3"),
        (3, 1, "e2 e3 e4 e5 e6 h1", "e2 e3 e4 e5 e6", "e4 e5 e6 h1"),
        (4, 1, "e2 e3 e4 e5 e6 e7 h1", "e2 e3 e4 e5 e6 e7", "e7"),
    ],
    ids=["first", "second", "parent-held", "after-rollback"],
)
def test_example_1(day: int, parent_day: int | None, due: str, supervised: str, new: str) -> None:
    """Late, border and holdout events, a held challenger and a rollback: the table of example 1."""
    settings = windowed(click=6 * HOUR)

    def bound(of_day: int, parent: Bound | None = None) -> Bound:
        return make_bound(settings, of_day, at(of_day + 1), of_day, parent)

    parent = bound(parent_day) if parent_day else None
    now = bound(day, parent)
    frame = table([event for event in EVENTS if event[1] <= day])
    mask = due_mask(now, parent, ["click"], 1)

    assert due.split() == chosen(frame, mask)
    assert supervised.split() == chosen(frame, mask, without="h")
    assert new.split() == chosen(frame, new_mask(now, [bound(k) for k in range(1, day)], ["click"], 1))
    assert at(day + 1) == now.cutoff_us
    assert {"click": at(day, 18)} == now.shown_before_us


def test_bound_behind_parent_is_refused() -> None:
    """Example 1: parent V3 at (3, 06-04) and a late re-run of night 06-01 at (4, 06-02)."""
    settings = windowed(click=6 * HOUR)
    parent = make_bound(settings, 3, at(4), 3, None)

    with pytest.raises(BoundError, match=r"commit 4, cutoff 2025-06-02T00:00:00Z.*commit 3, cutoff 2025-06-04T00") as e:
        check_not_behind(make_bound(settings, 4, at(2), 4, None), parent)

    assert e.value.exit_code == 2
    with pytest.raises(BoundError):
        check_not_behind(make_bound(settings, 2, at(5), 2, None), parent)
    check_not_behind(parent, parent)


def test_the_day_is_half_open() -> None:
    """An event exactly at D+1 00:00 belongs to D+1 only (case D8)."""
    settings = windowed(click=0)
    frame = table([("last", 1, at(2) - 1), ("border", 1, at(2))])
    first = make_bound(settings, 1, at(2), 1, None)
    second = make_bound(settings, 2, at(3), 2, first)

    assert chosen(frame, due_mask(first, None, ["click"], 1)) == ["last"]
    assert chosen(frame, due_mask(second, first, ["click"], 1)) == ["border"]


def test_windows_are_per_action() -> None:
    """A click is due while the purchase still waits; each bit comes once."""
    settings = windowed(click=HOUR, buy=48 * HOUR)
    names = ["click", "buy"]
    frame = table([("e", 1, at(1, 12))], known=0b11)
    bounds: list[Bound] = []
    masks = []
    for day in (1, 2, 3, 4):
        parent = bounds[-1] if bounds else None
        bounds.append(make_bound(settings, day, at(day + 1), day, parent))
        masks.append(frame.select(due_mask(bounds[-1], parent, names, 0b11)).item())

    assert masks == [0b01, 0, 0b10, 0]


def test_a_longer_window_never_moves_the_bound_back() -> None:
    """What was due under a short window is not due again after the window grew."""
    frame = table([("e", 1, at(1, 23))])
    parent = make_bound(windowed(click=0), 1, at(2), 1, None)
    now = make_bound(windowed(click=72 * HOUR), 2, at(3), 2, parent)

    assert parent.shown_before_us == now.shown_before_us
    assert chosen(frame, due_mask(now, parent, ["click"], 1)) == []


def test_lateness_adds_to_every_window() -> None:
    """matures_at = shown_at + window + lateness."""
    settings = windowed(click=HOUR)
    settings = settings.model_copy(update={"source": settings.source.model_copy(update={"lateness_seconds": HOUR})})

    assert {"click": at(1, 22)} == make_bound(settings, 1, at(2), 1, None).shown_before_us


def test_unknown_and_unsupervised_actions_are_never_due() -> None:
    """Only known bits of supervised actions are due; an action that the bound does not name is not inside."""
    now = make_bound(windowed(click=0, like=0), 1, at(2), 1, None)
    names = ["click", "like", "hate"]
    frame = table([("e", 1, at(1, 12))], known=0b110)

    assert frame.select(inside_mask(now, names)).item() == 0b011
    assert frame.select(due_mask(now, None, names, 0b111)).item() == 0b010
    assert frame.select(due_mask(now, None, names, 0b101)).item() == 0b000


def test_the_highest_bit_is_a_plain_int32() -> None:
    """31 actions fit: bit 30 neither overflows nor turns negative."""
    names = [f"a{i}" for i in range(31)]
    now = make_bound(windowed(**dict.fromkeys(names, 0)), 1, at(2), 1, None)
    mask = table([("e", 1, at(1, 12))], known=2**31 - 1).select(due_mask(now, None, names, 2**31 - 1)).to_series()

    assert pl.Int32 == mask.dtype
    assert mask.to_list() == [2**31 - 1]


def test_an_action_taken_out_of_supervision_is_not_due_twice() -> None:
    """Supervised, then not, then again: the parent's bound of the action is kept in between."""
    frame = table([("e", 1, at(1, 12)), ("f", 2, at(2, 12))], known=0b11)
    names = ["click", "like"]
    first = make_bound(windowed(click=0, like=0), 1, at(2), 1, None)
    second = make_bound(windowed(click=0), 2, at(3), 2, first)
    third = make_bound(windowed(click=0, like=0), 3, at(4), 3, second)

    assert first.shown_before_us["like"] == second.shown_before_us["like"]
    assert frame.select(due_mask(third, second, names, 0b11)).to_series().to_list() == [0, 0b10]


def test_context_commits_are_never_due_or_new() -> None:
    """A bootstrap history with due = false is read as history only."""
    now = make_bound(windowed(click=0), 2, at(2), 2, None)
    frame = table([("old", 1, at(1, 1)), ("day", 2, at(1, 2))])

    assert chosen(frame, due_mask(now, None, ["click"], 1, context_commits=frozenset([1]))) == ["day"]
    assert chosen(frame, new_mask(now, [], ["click"], 1, context_commits=frozenset([1]))) == ["day"]


def test_only_bounds_that_reach_furthest_decide_what_is_new() -> None:
    """Of a year of nights one bound decides; bounds that reach further in one action only all stay."""
    rows = [(f"e{commit}-{hour}", commit, at(1, hour)) for commit in range(1, 5) for hour in range(0, 24, 3)]
    frame, names = table(rows, known=0b11), ["click", "like"]
    now = Bound(commit=4, cutoff_us=at(3), shown_before_us={"click": at(3), "like": at(3)})
    year = [Bound(commit=n // 120, cutoff_us=n, shown_before_us={"click": at(1) + n}) for n in range(360)]
    crossing = [
        Bound(commit=2, cutoff_us=1, shown_before_us={"click": at(1, 20), "like": at(1, 5)}),
        Bound(commit=3, cutoff_us=2, shown_before_us={"click": at(1, 10), "like": at(1, 15)}),
        Bound(commit=1, cutoff_us=3, shown_before_us={"click": at(1, 20), "like": at(1, 4)}),
        Bound(commit=3, cutoff_us=2, shown_before_us={"click": at(1, 10)}),
    ]

    assert outermost(year) == year[-1:]
    assert outermost(crossing) == [crossing[1], crossing[0]]
    found = frame.select(new_mask(now, crossing, names, 0b11)).to_series()
    inside = [frame.select(inside_mask(bound, names)).to_series() for bound in crossing]
    assert found.to_list() == [0b11 & ~(a | b | c | d) for a, b, c, d in zip(*inside, strict=True)]
