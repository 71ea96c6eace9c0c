"""Troubles that people report of nightly data, on raw files through contract and event table (shared cases)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data import contract
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable
from gr_core.lake.events.writing import Writing
from gr_core.lake.source import list_files
from gr_core.refs import Rows
from tests import feeds
from tests.feeds import DAY

NEXT, LAST = DAY + timedelta(days=1), DAY + timedelta(days=2)


def row(name: str, at: str, user: int = 1, *, clicked: int | None = 0) -> dict[str, Any]:
    """Return a raw row shown at a UTC time."""
    shown = feeds.ms(datetime.fromisoformat(at).replace(tzinfo=UTC))
    return {"id": name, "uid": user, "item": 7, "ts": shown, "clicked": clicked, "liked": 0}


def parts(*files: list[dict[str, Any]]) -> list[pl.DataFrame]:
    """Return the files of a day."""
    return [pl.DataFrame(rows, infer_schema_length=None) for rows in files]


def ingest(config: Config, home: Path, *days: date) -> tuple[EventTable, list[Commit]]:
    """Ingest days in the order they are given."""
    table, feed = EventTable(str(home / "lake" / "events"), config), config.source.feeds[0]
    made = [
        table.ingest(
            day.isoformat(), contract.read_day(config, day, list_files(config, day, feed), feed=feed), parent=None
        )
        for day in days
    ]
    return table, made


def content(table: EventTable) -> dict[str, int]:
    """Return the commit of each event."""
    return dict(table.read(table.delta_version(), columns=["event_id", "commit"]).iter_rows())


def test_a_late_event_comes_in_once_with_its_own_night(tmp_path: Path) -> None:
    """Case E1: shown on the first day, in the second day's file, and delivered a third time: one event, commit 2."""
    config = feeds.make_config(tmp_path)
    feeds.write(tmp_path, *parts([row("a", "2025-06-01 10:00")]))
    feeds.write(tmp_path, *parts([row("late", "2025-06-01 23:50"), row("b", "2025-06-02 09:00")]), day=NEXT)
    feeds.write(tmp_path, *parts([row("late", "2025-06-01 23:50", clicked=1)]), day=LAST)
    table, made = ingest(config, tmp_path / "home", DAY, NEXT, LAST)

    assert content(table) == {"a": 1, "late": 2, "b": 2}
    assert [commit.rows.committed for commit in made] == [1, 2, 0]
    assert (made[2].rows.duplicates, made[2].updated) == (1, 1)


@pytest.mark.parametrize("late_days", [5, 29])
def test_late_events_are_found_again_wherever_their_rows_lie(tmp_path: Path, late_days: int) -> None:
    """A late row repeats an event of its own user far back; under another user it is another event."""
    config = feeds.make_config(tmp_path)
    then = datetime(2025, 6, 1, 12, tzinfo=UTC) - timedelta(days=late_days)
    old, feed_day = f"{then:%Y-%m-%d %H:%M}", then.date()
    feeds.write(tmp_path, *parts([row(f"e{user}", old, user) for user in range(40)]), day=feed_day)
    again = [row("e7", old, 7, clicked=1), row("e8", old, 9), row("today", "2025-06-01 12:00", 7)]
    feeds.write(tmp_path, *parts(again))
    table, made = ingest(config, tmp_path / "home", feed_day, DAY)

    assert made[1].rows == Rows(read=3, committed=2, duplicates=1)
    assert made[1].updated == 1
    assert table.read(table.delta_version()).height == 42


def test_a_part_that_is_uploaded_twice_counts_once(tmp_path: Path) -> None:
    """Case E2: five events twice, one of them again the next day, and two clicks in one second: seven events."""
    config = feeds.make_config(tmp_path)
    five = [row(f"e{number}", "2025-06-01 10:00", number) for number in range(5)]
    two = [row("x1", "2025-06-01 11:00:01", clicked=1), row("x2", "2025-06-01 11:00:01", clicked=1)]
    feeds.write(tmp_path, *parts(five, [*five, *two]))
    feeds.write(tmp_path, *parts([five[0]]), day=NEXT)
    table, made = ingest(config, tmp_path / "home", DAY, NEXT)

    assert [commit.rows for commit in made] == [Rows(read=12, committed=7, duplicates=5), Rows(read=1, duplicates=1)]
    assert len(content(table)) == 7


def test_rows_come_back_in_order_whatever_the_files_order(tmp_path: Path) -> None:
    """Case E5: the second file holds earlier events, another one the day before's."""
    config = feeds.make_config(tmp_path)
    files = parts(
        [row("c", "2025-06-01 15:00"), row("b2", "2025-06-01 09:00"), row("b1", "2025-06-01 09:00")],
        [row("a", "2025-06-01 03:00")],
        [row("y", "2025-05-31 22:00")],
    )
    feeds.write(tmp_path, *files)
    table, _ = ingest(config, tmp_path / "home", DAY)

    assert table.read(table.delta_version())["event_id"].to_list() == ["y", "a", "b1", "b2", "c"]


@pytest.mark.parametrize(
    ("day", "inside", "outside"),
    [
        (date(2025, 3, 9), ("2025-03-09 05:00", "2025-03-10 03:59:59"), ("2025-03-09 04:59:59", "2025-03-10 04:00")),
        (date(2025, 11, 2), ("2025-11-02 04:00", "2025-11-03 04:59:59"), ("2025-11-02 03:59:59", "2025-11-03 05:00")),
    ],
)
def test_lake_days_are_23_and_25_hours_long_where_clocks_shift(
    tmp_path: Path, day: date, inside: tuple[str, str], outside: tuple[str, str]
) -> None:
    """Cases D7, D8: half-open days in New York; the cap of one event a day keeps one of the day and both beside it."""
    config = feeds.make_config(tmp_path, lake={"zone": "America/New_York"}, daily_cap=1)
    rows = [row("first", inside[0]), row("last", inside[1]), row("before", outside[0]), row("after", outside[1])]
    feeds.write(tmp_path, *parts(rows), day=day)
    table, made = ingest(config, tmp_path / "home", day)

    assert sorted(content(table)) == ["after", "before", "first"]
    assert made[0].reasons == {"over_daily_cap": 1}


def test_a_backfilled_day_meets_the_days_that_came_before_it(tmp_path: Path) -> None:
    """An older day ingested last: its own commit, repeats found in newer commits, the cap counts their rows too."""
    config = feeds.make_config(tmp_path, daily_cap=2)
    feeds.write(tmp_path, *parts([row(name, "2025-06-01 10:00") for name in ("a", "b", "c")]))
    feeds.write(tmp_path, *parts([row("b", "2025-06-01 10:00"), row("n", "2025-06-02 10:00")]), day=NEXT)
    table, made = ingest(config, tmp_path / "home", NEXT, DAY)

    assert content(table) == {"b": 1, "n": 1, "a": 2}
    assert made[1].rows == Rows(read=3, committed=1, duplicates=1, quarantined=1)


@pytest.mark.parametrize("num_buckets", [2, 8])  # the failure is met while files are added, or when all are waited for
def test_a_write_that_breaks_off_is_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_buckets: int
) -> None:
    """Case C1: the second file of a commit fails: readers see the old state, no file stays, a rerun has all rows."""
    config = feeds.make_config(tmp_path, lake={"num_buckets": num_buckets})
    feeds.write(tmp_path, *parts([row("old", "2025-06-01 10:00")]))
    feeds.write(tmp_path, *parts([row(f"n{user}", "2025-06-02 10:00", user) for user in range(9)]), day=NEXT)
    table, _ = ingest(config, tmp_path / "home", DAY)
    files = sorted((tmp_path / "home").rglob("*.parquet"))
    write, written = Writing._write, []

    def break_off(self: Writing, path: str, *arguments: Any, **options: Any) -> Any:
        written.append(path)
        if len(written) == 2:
            raise OSError("the disk is full")
        return write(self, path, *arguments, **options)

    monkeypatch.setattr(Writing, "_write", break_off)
    with pytest.raises(OSError, match="the disk is full"):
        ingest(config, tmp_path / "home", NEXT)
    assert content(table) == {"old": 1}
    assert sorted((tmp_path / "home").rglob("*.parquet")) == files
    monkeypatch.undo()
    ingest(config, tmp_path / "home", NEXT)
    assert len(content(table)) == 10
