"""The event table: atomic commits, repeats that update, the daily cap, pinned reads, concurrent writers."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from gr_core.config import load_config
from gr_core.data.contract import read_day
from gr_core.errors import ConfigError, FormatError, UsageError
from gr_core.hashing import bucket_of, is_holdout
from gr_core.lake.events import EventTable
from gr_core.lake.source import preflight
from gr_core.refs import Bound, Rows
from tests.events import CLICK, LIKE, NOON, batch, event, make_config, masks, table


def test_a_table_that_was_never_made_is_empty(tmp_path: Path) -> None:
    """Asking changes nothing on disk."""
    events = table(tmp_path, make_config())

    assert not events.exists()
    assert events.delta_version() == -1
    assert events.last_commit() is None
    assert events.find("2025-06-01") is None
    assert events.quarantine(1).is_empty()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FormatError, match="no version 0"):
        events.read(0)


def test_one_ingestion_is_one_commit_that_tells_all(tmp_path: Path) -> None:
    """The commit's metadata give back every count, and the quarantine lies under its number."""
    config = make_config()
    events = table(tmp_path, config)
    made = events.ingest("2025-06-01", batch(config, event("a"), event("b"), bad=2, duplicates=3), parent=None)

    assert made.rows == Rows(read=7, committed=2, duplicates=3, quarantined=2)
    assert (made.number, made.delta_version, made.feed, made.reasons) == (1, 1, "log", {"null_user": 2})
    assert (made.updated, made.labels_changed_after_supervision, made.rows.forgotten) == (0, 0, 0)
    assert made == table(tmp_path, config).find("2025-06-01") == events.last_commit()
    assert events.delta_version() == 1
    assert events.read(1)["commit"].to_list() == [1, 1]
    assert events.quarantine(1)["reason"].to_list() == ["null_user"] * 2
    assert (tmp_path / "lake" / "quarantine" / "commit=1").is_dir()


def test_final_counts_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The counts with what the table knew and capped, when they are committed; a repeated ingestion says nothing."""
    config = make_config(daily_cap=1)
    events = table(tmp_path, config)
    caplog.set_level("INFO")
    for _ in range(2):
        events.ingest("n1", batch(config, event("a"), event("b"), bad=2, duplicates=3), parent=None)

    assert [record.getMessage() for record in caplog.records if record.name == "gr_core.lake.events"] == [
        "night n1 ingested as commit 1: read 7, committed 1, duplicates 3, quarantined 3 "
        "(null_user 2, over_daily_cap 1)"
    ]


def test_a_night_ingests_once(tmp_path: Path) -> None:
    """A repeated ingestion returns the night's commit and writes nothing, also after later commits."""
    config = make_config()
    events = table(tmp_path, config)
    first = events.ingest("n1", batch(config, event("a")), parent=None)
    events.ingest("n2", batch(config, event("b")), parent=None)

    assert events.ingest("n1", batch(config, event("other")), parent=None) == first
    assert events.delta_version() == 2


def test_an_empty_day_is_a_commit(tmp_path: Path) -> None:
    """No row, and only bad rows, both give a commit with its counts; the first of a table, too."""
    config = make_config()
    events = table(tmp_path, config)
    empty = events.ingest("n1", batch(config), parent=None)
    spoilt = events.ingest("n2", batch(config, bad=3), parent=None)

    assert (empty.number, empty.rows, empty.quarantine) == (1, Rows(), "")
    assert (spoilt.number, spoilt.rows) == (2, Rows(read=3, quarantined=3))
    assert events.read(spoilt.delta_version).is_empty()


def test_a_later_repeat_updates_what_it_knows_and_keeps_the_rest(tmp_path: Path) -> None:
    """Bits known in the new row and their times are taken; commit, shown_at, visible_at, item and others stay."""
    config = make_config(side=("tag",))
    events = table(tmp_path, config)
    others = [event(f"x{n}", f"u{n % 9}", actions=n % 4, tag=str(n), like_at=NOON) for n in range(60)]
    events.ingest("n1", batch(config, event("a", actions=CLICK, known=CLICK, tag="t"), *others), parent=None)
    before = events.read(1)
    later = NOON + timedelta(hours=3)
    repeat = event(
        "a",
        actions=LIKE,
        known=LIKE,
        like_at=later,
        click_at=later,
        shown_at=later,
        visible_at=later,
        item_id="j",
        tag="z",
    )
    made = events.ingest("n2", batch(config, repeat, event("new", "u1")), parent=None)
    after = events.read(made.delta_version)

    assert made.rows == Rows(read=2, committed=1, duplicates=1)
    assert made.updated == 1
    (row,) = after.filter(pl.col("event_id") == "a").drop("bucket").rows(named=True)
    assert row == {
        **{name: row[name] for name in ("user_id", "request_id")},
        "event_id": "a",
        "item_id": "i",
        "shown_at": NOON,
        "visible_at": NOON,
        "tag": "t",
        "commit": 1,
        "updated": 2,
        "actions": CLICK | LIKE,
        "known": CLICK | LIKE,
        "click_at": None,
        "like_at": later,
    }
    rest = ~pl.col("event_id").is_in(["a", "new"])
    assert_frame_equal(after.filter(rest), before.filter(rest))
    assert_frame_equal(events.read(1), before)


def test_a_repeat_under_another_user_finds_the_event(tmp_path: Path) -> None:
    """An event_id is unique in the table whatever the bucket; the event keeps its user."""
    config = make_config()
    events = table(tmp_path, config)
    first, second = (next(u for u in map(str, range(50)) if bucket_of(u, 4) == bucket) for bucket in (0, 1))
    events.ingest("n1", batch(config, event("a", first)), parent=None)
    made = events.ingest("n2", batch(config, event("a", second, actions=CLICK)), parent=None)

    assert events.read(made.delta_version).select("user_id", "bucket", "actions").rows() == [(first, 0, CLICK)]


def test_a_repeat_that_changes_nothing_rewrites_no_file(tmp_path: Path) -> None:
    """The same labels again are a duplicate and no update; what was unknown may stay so."""
    config = make_config()
    events = table(tmp_path, config)
    events.ingest("n1", batch(config, event("a", actions=CLICK)), parent=None)
    files = sorted((tmp_path / "lake/events").rglob("*.parquet"))
    made = events.ingest("n2", batch(config, event("a", known=0), event("a2", known=0)), parent=None)
    again = events.ingest("n3", batch(config, event("a", actions=CLICK)), parent=None)

    assert (made.rows.duplicates, made.updated, again.rows.duplicates, again.updated) == (1, 0, 1, 0)
    assert set(files) <= set((tmp_path / "lake/events").rglob("*.parquet"))
    assert masks(events.read(again.delta_version)) == {"a": (CLICK, 0b11), "a2": (0, 0)}


def test_repeats_are_found_within_dedup_days(tmp_path: Path) -> None:
    """A restated shown_at up to dedup_days away is the same event; farther away the id counts as new."""
    config = make_config(dedup_days=2)
    events = table(tmp_path, config)
    events.ingest("n1", batch(config, event("a")), parent=None)
    near = events.ingest("n2", batch(config, event("a", shown_at=NOON + timedelta(days=2))), parent=None)
    far = events.ingest("n3", batch(config, event("a", shown_at=NOON + timedelta(days=3))), parent=None)

    assert (near.rows.duplicates, far.rows.committed) == (1, 1)


def test_labels_that_change_after_supervision_are_counted(tmp_path: Path) -> None:
    """Known bits of trained users that flip inside the parent's bound count, one for each (event, action)."""
    config = make_config()
    events = table(tmp_path, config)
    trained = next(u for u in map(str, range(50)) if not is_holdout(u, 0.2))
    held = next(u for u in map(str, range(50)) if is_holdout(u, 0.2))
    us = round(NOON.timestamp() * 1e6)
    bound = Bound(commit=1, cutoff_us=us, shown_before_us={"click": us + 1, "like": us})
    rows = [
        event("both", trained, actions=CLICK),
        event("learnt", trained, known=0),
        event("held", held, actions=CLICK),
        event("later", trained, actions=CLICK, shown_at=NOON + timedelta(seconds=1)),
    ]
    events.ingest("n1", batch(config, *rows), parent=None)
    events.ingest("n2", batch(config, event("second", trained)), parent=bound)
    flipped = [event(row["event_id"], row["user_id"], actions=LIKE, shown_at=row["shown_at"]) for row in rows]
    made = events.ingest("n3", batch(config, *flipped, event("second", trained, actions=CLICK)), parent=bound)

    assert made.updated == 5
    assert made.labels_changed_after_supervision == 1


def test_the_daily_cap_counts_over_all_commits(tmp_path: Path) -> None:
    """Case E9: the earliest stay; the rest, and those of later commits, are quarantined with what they said."""
    config = make_config(daily_cap=3, lake={"zone": "Asia/Shanghai"})
    events = table(tmp_path, config)
    bot = [event(f"b{n}", "bot", shown_at=NOON - timedelta(seconds=n)) for n in range(50)]
    made = events.ingest("n1", batch(config, *bot, event("a")), parent=None)
    next_day = event("c", "bot", shown_at=datetime(2025, 6, 1, 16, tzinfo=UTC))
    late = event("d", "bot", shown_at=NOON - timedelta(hours=3))
    more = events.ingest("n2", batch(config, late, next_day, event("b49", "bot", actions=CLICK)), parent=None)

    assert made.rows == Rows(read=51, committed=4, quarantined=47)
    assert made.reasons == {"over_daily_cap": 47}
    assert more.rows == Rows(read=3, committed=1, duplicates=1, quarantined=1)
    kept = events.read(more.delta_version, users=["bot"])
    assert kept["event_id"].to_list() == ["b49", "b48", "b47", "c"]
    (row,) = events.quarantine(2).rows(named=True)
    assert (row["reason"], row["feed"], row["file"], json.loads(row["row"])["event_id"]) == (
        "over_daily_cap",
        "log",
        "f",
        "d",
    )


def test_equal_times_at_the_cap_go_by_event_id(tmp_path: Path) -> None:
    """Which events stay does not depend on the order of rows."""
    config = make_config(daily_cap=2)
    rows = [event(number) for number in "dbca"]
    for place, order in enumerate((rows, rows[::-1])):
        events = table(tmp_path / str(place), config)
        made = events.ingest("n1", batch(config, *order), parent=None)
        assert events.read(made.delta_version)["event_id"].to_list() == ["a", "b"]


def test_reads_are_pinned_and_filtered(tmp_path: Path) -> None:
    """Buckets, users, commits and columns narrow a read of a version that later commits do not change."""
    config = make_config()
    events = table(tmp_path, config)
    users = [str(number) for number in range(12)]
    events.ingest("n1", batch(config, *(event(f"a{u}", u) for u in users)), parent=None)
    second = events.ingest("n2", batch(config, event("b", "3")), parent=None)
    events.ingest("n3", batch(config, event("c", "3")), parent=None)

    assert events.read(1).height == 12
    assert events.read(2, users=["3"])["event_id"].to_list() == ["a3", "b"]
    assert events.read(2, commits_after=1)["event_id"].to_list() == ["b"]
    assert events.read(2, columns=["item_id", "event_id"]).columns == ["item_id", "event_id"]
    parts = [events.read(second.delta_version, buckets=[bucket]) for bucket in range(4)]
    assert all(part["bucket"].n_unique() == 1 for part in parts)
    assert sum(part.height for part in parts) == 13
    assert events.read(2, users=["3"], buckets=[(bucket_of("3", 4) + 1) % 4]).is_empty()
    assert events.read(2, users=[]).is_empty()
    assert events.read(2, columns=["actions"])["actions"].len() == 13
    with pytest.raises(FormatError, match="version 99"):
        events.read(99)


def test_columns_may_come_and_go_with_the_config(tmp_path: Path) -> None:
    """A new action or side feature is null in older rows and versions; one that is gone stays in the table."""
    old = make_config(actions=("click",), side=("tag",))
    new = make_config(actions=("click", "like"), side=("surface",))
    table(tmp_path, old).ingest("n1", batch(old, event("a", tag="t"), event("b", known=1)), parent=None)
    events = table(tmp_path, new)
    repeat = event("a", actions=LIKE, like_at=NOON)
    made = events.ingest("n2", batch(new, repeat, event("c", surface="tv", like_at=NOON)), parent=None)
    rows = events.read(made.delta_version).rows(named=True)

    assert [row["surface"] for row in rows] == [None, None, "tv"]
    assert [row["like_at"] for row in rows] == [NOON, None, NOON]
    assert masks(events.read(made.delta_version)) == {"a": (LIKE, 0b11), "b": (0, 1), "c": (0, 0b11)}
    assert events.read(1)["surface"].to_list() == [None, None]
    assert table(tmp_path, old).read(made.delta_version)["tag"].to_list() == ["t", None, None]


def test_the_lake_never_changes_in_a_home(tmp_path: Path) -> None:
    """Other buckets, zone or holdout than the table was made with are refused, by name."""
    config = make_config()
    table(tmp_path, config).ingest("n1", batch(config, event("a")), parent=None)

    with pytest.raises(ConfigError, match=r"lake never changes .*"):
        table(tmp_path, make_config(lake={"num_buckets": 8})).find("n1")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nights=st.lists(
        st.lists(
            st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("uv"), st.integers(0, 3), st.integers(0, 3)),
            max_size=8,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_counts_add_up_over_random_nights(
    tmp_path_factory: pytest.TempPathFactory, nights: list[list[tuple[str, str, int, int]]]
) -> None:
    """Property: rows add up, nobody exceeds the cap, and the table equals a plain replay of the nights."""
    config = make_config(daily_cap=3)
    events = table(tmp_path_factory.mktemp("t"), config)
    expected: dict[str, tuple[str, int, int]] = {}
    for place, night in enumerate(nights):
        rows = {number: event(number, user, actions=a & k, known=k) for number, user, a, k in night}
        made = events.ingest(f"n{place}", batch(config, *rows.values()), parent=None)
        made.rows.check()
        fresh = 0
        for number, row in sorted(rows.items()):
            mask = row["known"]
            if number in expected:
                user, actions, known = expected[number]
                expected[number] = (user, (actions & ~mask) | (row["actions"] & mask), known | mask)
            elif sum(user == row["user_id"] for user, _, _ in expected.values()) < 3:
                expected[number] = (row["user_id"], row["actions"], mask)
                fresh += 1
        assert made.rows.committed == fresh
    last = events.last_commit()
    assert last is not None
    found = events.read(last.delta_version)
    assert {row[0]: row[1:] for row in found.select("event_id", "user_id", "actions", "known").rows()} == expected


def test_kuairand_counts(root: Path, tmp_path: Path) -> None:
    """Example 4.1 on the real files, where they are: rows, bits and updates of the first night."""
    data = root.parent / "shared" / "data" / "kuairand"
    if not data.exists():
        pytest.skip("the KuaiRand files are not here")
    config = load_config(root / "conf" / "kuairand.toml", [f"source.root={data}"])
    events = EventTable(str(tmp_path / "events"), config)
    files = preflight(config, date(2022, 4, 25), bootstrap=True)
    commits = []
    for role in ("bootstrap", "events"):
        feed = config.source.feed(role)
        assert feed is not None
        commits.append(events.ingest(role, read_day(config, date(2022, 4, 25), files, feed=feed), parent=None))
    history = events.read(1, columns=["known"])
    day = events.read(2, commits_after=1, columns=["actions"])["actions"]

    assert commits[0].rows == Rows(read=817187, committed=817187)
    assert history["known"].unique().to_list() == [0b0000110]
    assert commits[1].rows == Rows(read=14911, committed=14652, duplicates=259)
    assert commits[1].updated == 3
    assert [((day & (1 << bit)) != 0).sum() for bit in range(3)] == [6495, 4633, 260]


@pytest.mark.parametrize("name", ["a b", "é漢", "50%", "a*b", "a:b"])
def test_homes_of_any_name(tmp_path: Path, name: str) -> None:
    """Spaces, other alphabets, % * and : in a home's path: rows are written there, merged, read and quarantined."""
    config = make_config()
    events = table(tmp_path / name, config)
    events.ingest("n1", batch(config, event("a", actions=0), event("b", "w"), bad=1), parent=None)
    events.ingest("n2", batch(config, event("a", actions=CLICK)), parent=None)
    rows = events.read(events.delta_version())

    assert rows.select("event_id", "actions").rows() == [("a", CLICK), ("b", 0)]
    assert events.read(events.delta_version(), users=["w"])["event_id"].to_list() == ["b"]
    assert events.quarantine(1).height == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(UsageError, match="may not contain '%20'"):
        table(tmp_path / "a%20b", config)
