"""Along any lineage every (event, action) is due exactly once, and new exactly once over the nights."""

import functools
from dataclasses import dataclass, field
from datetime import date, timedelta

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.config import Config
from gr_core.data.due import DueScope, check_not_behind, due_mask, make_bound, new_mask
from gr_core.errors import BoundError
from gr_core.refs import Bound
from gr_core.retrain import window_ends
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
# A full retrain that begins after a night, if any: how many days its windows have, which day it goes through, and how many
# nights go on before it has caught up.
retrains = st.none() | st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(0, 2))
# A night: its day, what its file holds, which checkpoint is its parent, windows, and whether it ingests at all.
nights = st.lists(st.tuples(st.integers(0, 8), files, st.integers(0, 20), windows, retrains), min_size=1, max_size=8)


@dataclass
class Home:
    """A lake with its nights: what was delivered, trained and new so far."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    checkpoints: list[Checkpoint | None] = field(default_factory=lambda: [None])
    finished: list[Bound] = field(default_factory=list)
    once_new: set[tuple[int, int]] = field(default_factory=set)

    def read(self) -> pl.DataFrame:
        """Return the event table."""
        schema = {"event_id": pl.Int64, "commit": pl.Int64, "shown_at": pl.Int64, "known": pl.Int32}
        table = pl.DataFrame(self.rows, schema=schema, orient="row")
        return table.with_columns(pl.col("shown_at").cast(pl.Datetime("us", "UTC")))

    def retrain(self, commit: int, days: int, through: int, windows: tuple[int, ...]) -> Checkpoint:
        """Train windows from no parent over all commits up to one, as `gr_core.retrain.next_window` bounds them."""
        made = None
        first, last = date(1970, 1, 1), date(1970, 1, 1) + timedelta(days=through)
        for end in window_ends(first, last, days):
            made = self.stretch(made, commit, (end - first).days, windows)
        assert made is not None
        return made

    def stretch(self, before: Checkpoint | None, commit: int, day: int, windows: tuple[int, ...]) -> Checkpoint:
        """Train one window, or catch up with the nights since."""
        table, at = self.read(), before.bound if before else None
        cutoff = max((day + 1) * DAY * US, at.cutoff_us if at else 0)
        now = make_bound(config(windows), commit, cutoff, commit, at)
        due = pairs(table, due_mask(now, at, NAMES, SUPERVISED))
        seen = before.seen if before else set()

        assert not due & seen, "due twice in the windows of a full retrain"
        assert not pairs(table, new_mask(now, [now], NAMES, SUPERVISED)), "new, in a full retrain"
        return Checkpoint(now, seen | due)

    def night(self, commit: int, day: int, choice: int, windows: tuple[int, ...]) -> None:
        """Run a night, unless its bound lies behind its parent's."""
        parent = self.checkpoints[choice % len(self.checkpoints)]
        watermark = parent.bound if parent else None
        cutoff = (day + 1) * DAY * US
        now = make_bound(config(windows), commit, cutoff, commit, watermark)
        if parent is not None:
            try:
                check_not_behind(now, parent.bound)
            except BoundError:
                return
        table = self.read()
        due = pairs(table, due_mask(now, watermark, NAMES, SUPERVISED))
        new = pairs(table, new_mask(now, self.finished, NAMES, SUPERVISED))
        seen = parent.seen if parent else set()

        assert not due & seen, "due twice on a lineage"
        assert not new & self.once_new, "new twice"
        inside = pairs(table, due_mask(now, None, NAMES, SUPERVISED))
        assert inside == due | seen, "inside the bound, but never due"
        assert pairs(table, replayable(now, watermark)) == seen, "replayed, but never due on the lineage, or due now"

        self.once_new.update(new)
        self.finished.append(now)
        self.checkpoints.append(Checkpoint(now, seen | due))


@settings(max_examples=120, deadline=None)
@given(nights=nights, constant=windows)
def test_due_once_on_every_lineage_and_new_once_over_nights(
    nights: list[tuple[int, list[tuple[int, int]], int, tuple[int, ...], tuple[int, int, int] | None]],
    constant: tuple[int, ...],
) -> None:
    """Random days (backfills between), parents (rejections, rollbacks), late events, windows that change, full retrains."""
    home = Home()
    under_way: list[tuple[int, Checkpoint]] = []
    for commit, (day, file, choice, windows, anew) in enumerate(nights, 1):
        home.rows += [(len(home.rows) + i, commit, second * US, known) for i, (second, known) in enumerate(file)]
        home.night(commit, day, choice, windows)
        if anew is not None:
            under_way.append((commit + anew[2], home.retrain(commit, anew[0], anew[1], windows)))
        newest = max(night[0] for night in nights[:commit])
        for lineage in [one for one in under_way if one[0] <= commit]:
            under_way.remove(lineage)
            home.checkpoints.append(home.stretch(lineage[1], commit, newest, windows))
    home.checkpoints += [lineage for _, lineage in under_way]
    # Long after, every lineage has seen everything, and everything was new.
    for choice in range(len(home.checkpoints)):
        home.night(len(nights), 40, choice, constant)
        last = home.checkpoints[-1]
        assert last is not None
        total = {(event, bit) for event, _, _, known in home.rows for bit in range(3) if known >> bit & 1}
        assert total == last.seen
    assert total == home.once_new
