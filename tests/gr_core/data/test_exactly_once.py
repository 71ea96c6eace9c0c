"""Along any lineage every (event, action) is due exactly once, and new exactly once over the nights."""

import functools
from dataclasses import dataclass, field

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.config import Config
from gr_core.data.due import DueScope, check_not_behind, due_mask, make_bound, new_mask
from gr_core.errors import BoundError
from gr_core.refs import Bound
from tests.feeds import windowed

DAY = 86_400
US = 1_000_000
NAMES = ["click", "like", "buy"]
SUPERVISED = 0b111


@functools.cache
def config(windows: tuple[int, ...]) -> Config:
    return windowed(**dict(zip(NAMES, windows, strict=True)))


@dataclass
class Checkpoint:
    """A trained night: its watermark, and what its lineage has supervised so far."""

    bound: Bound
    seen: set[tuple[int, int]] = field(default_factory=set)


def pairs(frame: pl.DataFrame, mask: pl.Expr) -> set[tuple[int, int]]:
    """Return (event, bit) of a mask."""
    rows = frame.select("event_id", mask=mask).rows()
    return {(event, bit) for event, value in rows for bit in range(len(NAMES)) if value >> bit & 1}


def replayable(now: Bound, parent: Bound | None) -> pl.Expr:
    """Return the mask of what a night may replay."""
    scope = DueScope(
        now=now,
        parent=parent,
        earlier=(),
        since=None,
        context_commits=frozenset(),
        action_names=tuple(NAMES),
        supervised=SUPERVISED,
    )
    return scope.old()


windows = st.tuples(*(st.sampled_from([0, 1800, DAY, 3 * DAY + 1]) for _ in NAMES))
# Seconds since the epoch's day 0, day borders among them; events of a file may be days old, or of the future.
shown = st.one_of(st.integers(0, 9 * DAY), st.integers(0, 9).map(lambda day: day * DAY))
files = st.lists(st.tuples(shown, st.integers(0, 7)), max_size=4)
# A night: its day, what its file holds, which checkpoint is its parent, windows, and whether it ingests at all.
nights = st.lists(st.tuples(st.integers(0, 8), files, st.integers(0, 20), windows), min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(nights=nights, constant=windows)
def test_due_once_on_every_lineage_and_new_once_over_nights(
    nights: list[tuple[int, list[tuple[int, int]], int, tuple[int, ...]]], constant: tuple[int, ...]
) -> None:
    """Random days (backfills between), parents (rejections, rollbacks), late events, windows that change."""
    rows: list[tuple[int, int, int, int]] = []
    checkpoints: list[Checkpoint | None] = [None]
    finished: list[Bound] = []
    once_new: set[tuple[int, int]] = set()

    def run(commit: int, day: int, choice: int, windows: tuple[int, ...]) -> None:
        parent = checkpoints[choice % len(checkpoints)]
        watermark = parent.bound if parent else None
        cutoff = (day + 1) * DAY * US
        now = make_bound(config(windows), commit, cutoff, commit, watermark)
        if parent is not None:
            try:
                check_not_behind(now, parent.bound)
            except BoundError:
                return
        table = pl.DataFrame(
            rows,
            schema={"event_id": pl.Int64, "commit": pl.Int64, "shown_at": pl.Int64, "known": pl.Int32},
            orient="row",
        ).with_columns(pl.col("shown_at").cast(pl.Datetime("us", "UTC")))
        due = pairs(table, due_mask(now, watermark, NAMES, SUPERVISED))
        new = pairs(table, new_mask(now, finished, NAMES, SUPERVISED))
        seen = parent.seen if parent else set()

        assert not due & seen, "due twice on a lineage"
        assert not new & once_new, "new twice"
        inside = pairs(table, due_mask(now, None, NAMES, SUPERVISED))
        assert inside == due | seen, "inside the bound, but never due"
        assert pairs(table, replayable(now, watermark)) == seen, "replayed, but never due on the lineage, or due now"

        once_new.update(new)
        finished.append(now)
        checkpoints.append(Checkpoint(now, seen | due))

    for commit, (day, file, choice, windows) in enumerate(nights, 1):
        rows += [(len(rows) + i, commit, second * US, known) for i, (second, known) in enumerate(file)]
        run(commit, day, choice, windows)
    # Long after, every lineage has seen everything, and everything was new.
    for choice in range(len(checkpoints)):
        run(len(nights), 40, choice, constant)
        last = checkpoints[-1]
        assert last is not None
        total = {(event, bit) for event, _, _, known in rows for bit in range(3) if known >> bit & 1}
        assert total == last.seen
    assert total == once_new
