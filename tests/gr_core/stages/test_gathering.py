"""What the store and recent rows give equals what the whole bucket gives, for any order of nights, delays and updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data.due import DueScope, make_bound
from gr_core.data.ragged import SEGMENT_TYPES
from gr_core.data.sequences import SequenceRules, Sequences, build_sequences
from gr_core.hashing import bucket_of, is_holdout
from gr_core.lake import history, history_rows
from gr_core.lake.events import EventTable, erasure
from gr_core.lake.history import HistoryStore, Snapshot, Stored
from gr_core.refs import NEVER, Bound
from gr_core.stages import gathering
from gr_core.stages.gathering import ROLES, Gatherer, history_columns, needed, recent_from
from tests.events import batch, event, make_config, table
from tests.sequences import US

DAY = 86_400
HELD_OUT = 0.2


def rules(**changes: Any) -> SequenceRules:
    """Return rules under which a few events are more than a target sees."""
    values: dict[str, Any] = {
        "action_names": ("click", "like"),
        "features": ("item_id", "kind", "surface"),
        "item_features": ("item_id", "kind"),
        "fallback_by": (("item_id", "author"), ("surface", "kind")),
        "max_history": 4,
        "max_targets": 3,
        "max_age_us": 300 * DAY * US,
        "token_budget": 64,
    }
    return SequenceRules(**{**values, **changes})


def moment(second: float) -> datetime:
    """Return a second of the world as a time."""
    return datetime.fromtimestamp(second, UTC)


@dataclass
class World:
    """Random nights on a small table: busy and rare users, late rows, repeats that change actions."""

    folder: Path
    seed: int
    rules: SequenceRules
    bounds: list[Bound] = field(default_factory=list)
    from_store: int = 0
    short: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    again: bool = False

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.config: Config = make_config(
            side=("kind", "surface", "author"), visibility_delay_seconds=0, lake={"num_buckets": 4}
        )
        self.table: EventTable = table(self.folder, self.config)

    def night(self, day: int, *, rows: int = 30) -> Bound:
        """Commit a day's random rows, some of them late or repeated."""
        rng, new = self.rng, []
        for number in range(rows):
            late = int(rng.integers(1, 4)) if rng.random() < 0.15 else 0
            shown = float((day - late) * DAY + rng.integers(0, 96) * 900)
            user = f"u{int(rng.integers(0, 3)) if rng.random() < 0.5 else int(rng.integers(0, 25))}"
            new.append(self.row(self.name(day, number), user, shown))
        for old in rng.choice(len(self.events), min(5, len(self.events)), replace=False) if self.events else []:
            was = self.events[int(old)]
            if any(row["event_id"] == was["event_id"] for row in new):
                continue  # a batch has one row of each
            row = self.row(was["event_id"], was["user_id"], was["shown_at"].timestamp())
            new.append({**row, "visible_at": was["visible_at"]})
        self.events += new[:rows]
        made = self.table.ingest(f"night-{day}", batch(self.config, *new), parent=None)
        return make_bound(self.config, made.number, (day + 1) * DAY * US, made.delta_version, None)

    def name(self, day: int, number: int) -> str:
        """Return an event's id; where ids come again, each does every second day."""
        return f"d{day % 2}-{number}" if self.again else f"d{day}-{number}"

    def row(self, number: str, user: str, shown: float) -> dict[str, Any]:
        """Return a random row of a user."""
        rng = self.rng
        actions = int(rng.integers(0, 4))
        side = {name: str(rng.choice(["a", "bb", "ü"])) if rng.random() < 0.8 else None for name in self.sides}
        after = [int(rng.choice([0, 300, 3600, 2 * DAY])) for _ in range(2)]
        return event(
            number,
            user,
            actions=actions,
            known=int(rng.choice([0b11, 0b11, 0b01])) | actions,
            item_id=f"i{int(rng.integers(0, 9))}",
            shown_at=moment(shown),
            visible_at=moment(shown + int(rng.choice([0, 600, 1800]))),
            click_at=moment(shown + after[0]) if actions & 1 and rng.random() < 0.7 else None,
            like_at=moment(shown + after[1]) if actions & 2 else None,
            **side,
        )

    sides = ("kind", "surface", "author")

    def scope(self, now: Bound, parent: Bound | None, since: Bound | None) -> DueScope:
        """Return the scope of a night after all earlier ones."""
        return DueScope(
            now=now,
            parent=parent,
            earlier=tuple(self.bounds),
            since=since,
            context_commits=frozenset(),
            action_names=("click", "like"),
            supervised=0b11,
        )

    def store(self, bucket: int) -> HistoryStore:
        """Return a bucket's store."""
        columns = history_columns(self.rules)
        return HistoryStore(str(self.folder / "lake" / "history"), bucket, columns, self.rules.max_history)

    def gatherer(self, scope: DueScope, bucket: int) -> Gatherer:
        """Return what the stage would gather with."""
        return Gatherer(
            table=self.table,
            history=self.store(bucket),
            scope=scope,
            rules=self.rules,
            bucket=bucket,
            holdout_fraction=HELD_OUT,
        )

    def compare(self, scope: DueScope) -> None:
        """Gather every bucket, compare all sequences and counts with those of all its rows."""
        for bucket in range(4):
            gathered = self.gatherer(scope, bucket).gather()
            everything = self.table.read(scope.now.delta_version, buckets=[bucket])
            held = pl.Series([is_holdout(user, HELD_OUT) for user in everything["user_id"]], dtype=pl.Boolean)
            masks = scope.masks(everything, held)
            fresh = (pl.col("commit") > scope.parent_commit) & (pl.col("commit") <= scope.now.commit)
            marked = everything.with_columns(*(masks[role].alias(role) for role in ROLES), counted=fresh & ~held)
            assert_equal(built(gathered.rows, self.rules), built(needed(marked, self.rules), self.rules))
            for name, mask in masks.items():
                assert gathered.counts[name] == int((mask != 0).sum())
            self.from_store += gathered.from_store
            if scope.since is not None and gathered.from_store:
                self.short += gathered.from_table

    def advance(self, day: int, parent: Bound | None, since: Bound | None) -> Bound:
        """Run a night and compare."""
        now = self.night(day)
        self.compare(self.scope(now, parent, since))
        self.bounds.append(now)
        return now


def built(rows: pl.DataFrame, limits: SequenceRules) -> Sequences:
    """Build the sequences of marked rows."""
    return build_sequences(rows, {role: rows[role] for role in ROLES}, limits, counted=rows["counted"])


def assert_equal(found: Sequences, expected: Sequences) -> None:
    """Compare all that is written of sequences."""
    for name in ("rows", *SEGMENT_TYPES):
        np.testing.assert_array_equal(getattr(found.ragged, name), getattr(expected.ragged, name))
    assert found.ragged.num_history == expected.ragged.num_history
    assert found.ragged.users.equals(expected.ragged.users)
    assert found.ragged.event_ids.equals(expected.ragged.event_ids)
    assert all(found.ids[name].equals(expected.ids[name]) for name in expected.ids)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_history": 2, "time_window_us": 20 * 3600 * US},
    {"max_history": 6, "max_age_us": 2 * DAY * US},
    {"max_history": 1, "max_targets": 1, "fallback_by": (("item_id", "surface"),)},
]


@pytest.mark.parametrize("seed", range(4))
def test_sequences_equal_those_of_all_rows(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random nights with late rows, updates, held challengers, named parents and windows: equal frames each night."""
    deep: list[int] = []
    read = Snapshot.read

    def watched(self: Snapshot, users: pl.Series, **named: Any) -> Stored:
        deep.append(len(users) * named.get("deep", 0))
        return read(self, users, **named)

    monkeypatch.setattr(Snapshot, "read", watched)
    if seed != 2:  # heads so short that deep entries have to help
        monkeypatch.setattr(history_rows, "_MOST_HEAD", 1.5)
    if seed % 2:  # so little in both that the table has to
        monkeypatch.setattr(gathering, "_LATE_US", DAY * US)
        monkeypatch.setattr(history_rows, "_ALL", 1.5)
    world = World(tmp_path, seed, rules(**VARIANTS[seed]))
    rng = np.random.default_rng(seed)
    for day in range(1, 9):
        past = world.bounds
        parent = past[-1] if past and rng.random() < 0.6 else (past[int(rng.integers(len(past)))] if past else None)
        since = past[-3] if len(past) >= 3 else None
        world.advance(day, parent, since)

    assert world.from_store > 30
    assert sum(deep) > 3 or seed == 2
    assert (world.short > 0) == (seed % 2 == 1)
    if seed == 0:  # a night run again sees the state of its own version or an older one, never a later one
        world.bounds = past[:5]
        world.compare(world.scope(past[5], past[4], past[2]))


@pytest.mark.parametrize("seed", range(2))
def test_an_event_id_that_comes_again_names_an_event_of_its_own(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further apart than dedup_days it is another event, of the same user or another: none hides or marks another's."""
    if seed % 2:
        monkeypatch.setattr(history_rows, "_MOST_HEAD", 1.5)
        monkeypatch.setattr(history_rows, "_ALL", 1.5)
        monkeypatch.setattr(gathering, "_LATE_US", DAY * US)
    world = World(tmp_path, seed, rules(), again=True)
    world.table.config = world.config = world.config.model_copy(
        update={"source": world.config.source.model_copy(update={"dedup_days": 0})}
    )
    for day in range(1, 7):
        past = world.bounds
        world.advance(day, past[-1 - seed % 2] if len(past) > 1 else None, past[-3] if len(past) >= 3 else None)

    events = world.table.read(world.table.delta_version())
    assert events["event_id"].is_duplicated().sum() > 50
    assert world.from_store > 30


def busy(tmp_path: Path, nights: int = 4) -> World:
    """Run nights that all start from the one before, with a window of one night."""
    world = World(tmp_path, 7, rules())
    for day in range(1, nights + 1):
        world.advance(day, world.bounds[-1] if world.bounds else None, world.bounds[-1] if world.bounds else None)
    return world


def files(world: World, pattern: str) -> Iterator[Path]:
    """Find files of the store."""
    return (world.folder / "lake" / "history").rglob(pattern)


@pytest.mark.parametrize(
    ("pattern", "how"), [("manifest-*", "flipped"), ("*.data", "flipped"), ("*.data", "gone"), ("*.index", "cut")]
)
def test_a_damaged_store_is_read_again_from_the_table(tmp_path: Path, pattern: str, how: str) -> None:
    """A flipped byte, a short file or a missing one: the night's sequences are those of all rows, and so the next's."""
    world = busy(tmp_path, nights=2)
    for path in files(world, pattern):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(content if how == "flipped" else content[:-3])
    store_before = world.from_store

    world.advance(3, world.bounds[-1], world.bounds[-1])
    assert pattern == "*.data" or world.from_store == store_before
    world.advance(4, world.bounds[-1], world.bounds[-1])

    assert world.from_store > store_before


def test_a_kill_between_generation_and_manifest_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The night is run again from the state before it; what the killed one wrote is swept."""
    world = busy(tmp_path, nights=2)
    now = world.night(3)
    scope = world.scope(now, world.bounds[-1], world.bounds[-1])
    with monkeypatch.context() as patched:
        patched.setattr(history.HistoryStore, "_put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.compare(scope)
    written = {path.name for path in files(world, f"{now.delta_version:020d}*.data")}
    assert written

    world.compare(scope)
    world.bounds.append(now)

    named = {path.stem for path in files(world, "*.data")}
    told = "".join(path.read_text() for path in files(world, "manifest-*"))
    assert all(name in told for name in named)
    world.advance(4, now, now)


def test_rows_that_left_the_table_are_in_no_history(tmp_path: Path) -> None:
    """After rows were removed every bucket is read again, and the store is made anew."""
    world = busy(tmp_path, nights=3)
    before = world.from_store
    assert erasure.forget_rows(world.table.at, world.table.uri, "u1", 4)

    world.advance(4, world.bounds[-1], world.bounds[-1])
    assert world.from_store == before
    world.advance(5, world.bounds[-1], world.bounds[-1])

    assert world.from_store > before


def test_a_purged_store_goes_on(tmp_path: Path) -> None:
    """Where only a forgotten user's rows left and he was purged, no bucket is read again."""
    world = busy(tmp_path, nights=3)
    before = world.from_store
    assert erasure.forget_rows(world.table.at, world.table.uri, "u1", 4)
    own = bucket_of("u1", 4)
    assert sum(world.store(bucket).purge(["u1"] if bucket == own else [], 1) for bucket in range(4)) > 0

    world.events = [row for row in world.events if row["user_id"] != "u1"]
    world.advance(4, world.bounds[-1], world.bounds[-1])

    assert world.from_store > before


def test_other_rules_make_another_store(tmp_path: Path) -> None:
    """A night with a longer max_history cannot use entries that were capped for a shorter one."""
    world = busy(tmp_path, nights=3)
    before = world.from_store
    world.rules = rules(max_history=8)

    world.advance(4, world.bounds[-1], world.bounds[-1])
    assert world.from_store == before
    world.advance(5, world.bounds[-1], world.bounds[-1])

    assert world.from_store > before


def test_an_action_that_a_bound_does_not_name_makes_any_row_recent(tmp_path: Path) -> None:
    """A newly supervised action is due on all rows: the bucket is read whole."""
    world = busy(tmp_path, nights=2)
    now = world.night(3)
    old = Bound(commit=2, cutoff_us=now.cutoff_us, shown_before_us={"click": 3}, delta_version=now.delta_version)

    assert recent_from(world.scope(now, old, world.bounds[0])) is None
    assert recent_from(world.scope(now, None, world.bounds[0])) is None
    assert recent_from(world.scope(now, world.bounds[0], None)) == (1, 2 * DAY * US)


def test_entries_keep_what_soon_and_late_targets_need() -> None:
    """A head has all rows since the usual start and max_history older ones, the deep entry those for late targets."""
    newest = np.array([*range(1, 41), 100, 101], dtype=np.int64)
    rows = history_rows.UserRows(starts=np.array([0, 40, 42]), visible=newest, newest=newest)
    never = np.full(2, NEVER)

    wanted = history_rows.cuts(rows, 5, 39, 31)
    assert (wanted.head.tolist(), wanted.total.tolist(), wanted.over.tolist()) == ([7, 7], [15, 15], [True, False])
    made = history_rows.split(rows, never, wanted)
    assert newest[made.head].tolist() == [*range(34, 41), 100, 101]
    assert (made.head_floors.tolist(), made.deep_floors.tolist()) == ([34, NEVER], [26])
    assert newest[made.deep].tolist() == [*range(26, 34), 40]

    made = history_rows.split(rows, np.array([30, 200]), wanted)
    assert (made.head_floors.tolist(), made.deep_floors.tolist()) == ([34, 200], [30])
    assert newest[made.deep].tolist() == [*range(30, 34), 40]
    assert not history_rows.cuts(rows, 40, 39, 31).over.any()
