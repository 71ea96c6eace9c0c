"""Reads of the event table that open only the files whose statistics may hold what is asked for."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.hashing import bucket_of
from gr_core.lake.events import EventTable
from tests.events import CLICK, NOON, batch, event, make_config, table


def us(moment: datetime) -> int:
    """Return a moment in microseconds since the epoch."""
    return round(moment.timestamp() * 1e6)


def nights(path: Path) -> EventTable:
    """Return a table of four nights: one event of every user a day, and in the last an update of the first's."""
    config = make_config()
    events = table(path, config)
    for day in range(4):
        at = NOON + timedelta(days=day)
        rows = [event(f"{user}-{day}", user, shown_at=at, visible_at=at) for user in map(str, range(24))]
        rows += [event("0-0", "0", actions=CLICK)] * (day == 3)
        events.ingest(f"n{day}", batch(config, *rows), parent=None)
    return events


def test_users_of_any_letters_are_found_by_the_statistics(tmp_path: Path) -> None:
    """Ids from every plane of Unicode, long ones and those of control characters: each is in the file that is opened."""
    users = ["\U0010ffff", "\U0010ffff" * 40, "\U00020bb7", "\U0001f600", "\uffff", "\x00", "a" * 5000, 'a"\\b', "\n"]
    config = make_config()
    for place, user in enumerate(users):
        events = table(tmp_path / str(place), config)
        events.ingest("n", batch(config, event("e", user), event("f", "0", bucket=bucket_of(user, 4))), parent=None)
        read = events.read_users(events.delta_version(), bucket=bucket_of(user, 4), users=[user])
        assert read["event_id"].to_list() == ["e"], repr(user[:9])


@pytest.mark.parametrize("commit_after", [0, 2, 4])
@pytest.mark.parametrize("shown_day", [None, 0, 3])
@pytest.mark.parametrize("updated_after", [None, 3])
def test_read_since_gives_what_a_filter_of_everything_gives(
    tmp_path: Path, commit_after: int, shown_day: int | None, updated_after: int | None
) -> None:
    """Rows of later commits, or shown since, or changed since: equal to a filter of the whole bucket."""
    events = nights(tmp_path)
    version = events.delta_version()
    since = None if shown_day is None else us(NOON + timedelta(days=shown_day))
    for bucket in range(4):
        found = events.read_since(
            version, bucket=bucket, commit_after=commit_after, shown_from_us=since, updated_after=updated_after
        )
        whole = events.read(version, buckets=[bucket])
        keep = pl.col("commit") > commit_after
        if since is not None:
            keep = keep | (pl.col("shown_at").dt.timestamp("us") >= since)
        if updated_after is not None:
            keep = keep | (pl.col("updated") > updated_after)
        assert_frame_equal(found, whole.filter(keep))


def test_an_update_is_told_by_its_number(tmp_path: Path) -> None:
    """`updated` is the commit at first, then that of the last ingestion that changed the row; `commit` stays."""
    events = nights(tmp_path)
    rows = events.read(events.delta_version(), columns=["event_id", "commit", "updated", "actions"])
    changed = rows.filter(pl.col("updated") != pl.col("commit"))

    assert changed.rows() == [("0-0", 1, 4, CLICK)]


def test_read_users_gives_all_rows_of_these_users(tmp_path: Path) -> None:
    """Users of the bucket, of another one, unknown ones and none at all."""
    events = nights(tmp_path)
    version = events.delta_version()
    users = [user for user in map(str, range(24)) if bucket_of(user, 4) == 1]
    other = next(user for user in map(str, range(24)) if bucket_of(user, 4) == 2)
    found = events.read_users(version, bucket=1, users=[*users[:2], other, "nobody"])

    assert found["user_id"].unique().sort().to_list() == sorted(users[:2])
    assert_frame_equal(found, events.read(version, users=users[:2]))
    assert events.read_users(version, bucket=1, users=[]).is_empty()
    assert events.read_users(version, bucket=1, users=users[:1], columns=["item_id"]).columns == ["item_id"]


def test_a_night_is_found_without_a_walk_through_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking a night up, the last commit, quarantine and a repeated ingestion never ask for the history."""
    events = nights(tmp_path)
    monkeypatch.setattr("deltalake.DeltaTable.history", None)
    first = events.find("n0")

    assert first is not None
    assert (first.number, first.delta_version) == (1, 1)
    assert events.find("n9") is None
    assert events.ingest("n0", batch(make_config()), parent=None) == first
    assert [commit.night for commit in events.commits()] == ["n0", "n1", "n2", "n3"]
    assert events.last_commit() == events.find("n3")
    assert events.erasures() == 0
