"""Feed days that are delivered again: read with the next night, as updates or in place of what came before."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data import checks, contract
from gr_core.errors import ConfigError, DataContractError
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable
from gr_core.lake.source import list_files
from gr_core.refs import Rows
from gr_core.stages import ingesting
from tests import feeds
from tests.feeds import DAY, NOON

NEXT = DAY + timedelta(days=1)
LAST = DAY + timedelta(days=2)


def row(name: str, *, day: date = DAY, clicked: int | None = 0, hours: float = 0) -> dict[str, Any]:
    """Return a raw row shown so many hours after noon of a day."""
    shown = NOON + (day - DAY) + timedelta(hours=hours)
    return {"id": name, "uid": 1, "item": 7, "ts": feeds.ms(shown), "clicked": clicked, "liked": 0}


def deliver(root: Path, day: date, *rows: dict[str, Any]) -> None:
    """Write a day's one file, over an earlier delivery."""
    feeds.write(root, pl.DataFrame(list(rows), infer_schema_length=None), day=day)


def config_of(root: Path, restate: str = "update", **source: Any) -> Config:
    """Return a config that reads changed deliveries of the last three days again."""
    return feeds.make_config(root, restate=restate, restate_days=3, **source)


def night(config: Config, home: Path, day: date) -> tuple[EventTable, Commit]:
    """Ingest a day as the stage does."""
    table, feed = EventTable(str(home / "lake" / "events"), config), config.source.feeds[0]
    again = ingesting.restated(config, table, day, feed)
    batch = contract.read_day(config, day, list_files(config, day, feed), feed=feed, restated=again)
    return table, table.ingest(day.isoformat(), batch, parent=None)


def content(table: EventTable) -> dict[str, tuple[int, int, int]]:
    """Return commit, actions and updated of each event in the table."""
    rows = table.read(table.delta_version(), columns=["event_id", "commit", "actions", "updated"]).rows()
    return {name: tuple(rest) for name, *rest in rows}


def test_a_delivery_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    """The next night reads its own day alone; a file that is only listed in another order is the same delivery."""
    config = config_of(tmp_path / "raw")
    deliver(tmp_path / "raw", DAY, row("a"))
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT))
    night(config, tmp_path, DAY)
    table, made = night(config, tmp_path, NEXT)

    assert (made.rows, made.restated, made.numbers) == (Rows(read=1, committed=1), 0, {})
    assert content(table) == {"a": (1, 0, 1), "b": (2, 0, 2)}


@pytest.mark.parametrize("buckets", [1, 8])
def test_a_restated_day_updates_and_adds(tmp_path: Path, buckets: int) -> None:
    """With update, rows that are not delivered again stay; the rest joins the next night's one commit."""
    config = config_of(tmp_path / "raw", lake={"num_buckets": buckets})
    deliver(tmp_path / "raw", DAY, row("kept"), row("flipped"), row("gone"))
    table, first = night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("kept"), row("flipped", clicked=1), row("late", hours=1))
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT))
    _, made = night(config, tmp_path, NEXT)

    assert made.rows == Rows(read=4, committed=2, duplicates=2)
    assert (made.number, made.restated, made.updated, made.replaced) == (3, 3, 1, 0)
    assert made.numbers == {DAY.isoformat(): [1, 2]}
    assert content(table) == {
        "kept": (1, 0, 1),
        "flipped": (1, 1, 3),
        "gone": (1, 0, 1),
        "late": (2, 0, 3),
        "b": (3, 0, 3),
    }
    assert made.delta_version == first.delta_version + 1
    assert [commit.night for commit in table.commits()] == [DAY.isoformat(), NEXT.isoformat()]


def test_a_restated_day_replaces_what_came_before(tmp_path: Path) -> None:
    """With replace, rows of the day that are not delivered again leave, counted and marked; old versions have them."""
    config = config_of(tmp_path / "raw", "replace")
    deliver(tmp_path / "raw", DAY, row("kept"), row("flipped"), row("gone"))
    table, first = night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("kept"), row("flipped", clicked=1), row("new"))
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT), row("of the first day", hours=2))
    _, made = night(config, tmp_path, NEXT)

    assert made.rows == Rows(read=5, committed=3, duplicates=2)
    assert (made.updated, made.replaced, table.erasures()) == (1, 1, 1)
    assert content(table) == {
        "kept": (1, 0, 1),
        "flipped": (1, 1, 3),
        "new": (2, 0, 3),
        "b": (3, 0, 3),
        "of the first day": (3, 0, 3),
    }
    assert table.read(first.delta_version, columns=["event_id"]).height == 3


def test_a_day_can_be_restated_again(tmp_path: Path) -> None:
    """The second time what only the first restatement brought goes too; other days' rows of that time stay."""
    config = config_of(tmp_path / "raw", "replace")
    deliver(tmp_path / "raw", DAY, row("a"), row("b"))
    night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("a"), row("c"))
    deliver(tmp_path / "raw", NEXT, row("d", day=NEXT), row("late", hours=3))
    night(config, tmp_path, NEXT)
    deliver(tmp_path / "raw", DAY, row("b", clicked=1))
    deliver(tmp_path / "raw", LAST, row("e", day=LAST))
    table, made = night(config, tmp_path, LAST)

    assert made.numbers == {DAY.isoformat(): [1, 2, 4]}
    assert (made.replaced, made.rows.committed) == (2, 2)
    assert content(table) == {"b": (4, 1, 5), "d": (3, 0, 3), "late": (3, 0, 3), "e": (5, 0, 5)}


def test_rows_of_a_restated_day_keep_to_its_own_end(tmp_path: Path) -> None:
    """The clock-skew rule counts from the end of each row's own feed day (case E4)."""
    config = config_of(tmp_path / "raw")
    deliver(tmp_path / "raw", DAY, row("a"))
    night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("a"), row("future", hours=20))
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT, hours=3))
    table, made = night(config, tmp_path, NEXT)

    assert made.reasons == {"clock_skew": 1}
    assert set(content(table)) == {"a", "b"}


def test_room_that_replaced_rows_leave_under_the_cap_is_used(tmp_path: Path) -> None:
    """The daily cap counts what the table holds after the replacement."""
    config = config_of(tmp_path / "raw", "replace", daily_cap=2)
    deliver(tmp_path / "raw", DAY, row("a"), row("b", hours=1))
    night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("a"), row("c", hours=2), row("d", hours=3))
    deliver(tmp_path / "raw", NEXT, row("e", day=NEXT))
    table, made = night(config, tmp_path, NEXT)

    assert made.reasons == {"over_daily_cap": 1}
    assert set(content(table)) == {"a", "c", "e"}


def test_a_day_that_was_empty_is_read_when_it_comes(tmp_path: Path) -> None:
    """A missing day that its night passed over comes in with the next; a day no night read is left alone."""
    config = config_of(tmp_path / "raw", missing_day="warn")
    night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("a"))
    deliver(tmp_path / "raw", DAY - timedelta(days=1), row("before", day=DAY - timedelta(days=1)))
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT))
    table, made = night(config, tmp_path, NEXT)

    assert made.numbers == {DAY.isoformat(): [1, 2]}
    assert set(content(table)) == {"a", "b"}


def test_a_restated_day_without_a_usable_row_stops_the_night(tmp_path: Path) -> None:
    """Committed, it would take the whole day's events away with `replace`; nothing is."""
    config = config_of(tmp_path / "raw", "replace")
    deliver(tmp_path / "raw", DAY, row("a"))
    table, _ = night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, {**row("a"), "ts": 5})
    deliver(tmp_path / "raw", NEXT, row("b", day=NEXT))

    with pytest.raises(DataContractError, match=f"feed log of {DAY}: none of the 1 rows read is usable"):
        night(config, tmp_path, NEXT)
    assert set(content(table)) == {"a"}


def test_data_checks_look_at_the_night_s_own_rows(tmp_path: Path) -> None:
    """A restated day neither makes the night's volume odd nor its duplicates."""
    config = config_of(tmp_path / "raw")
    deliver(tmp_path / "raw", DAY, row("a"), row("b"))
    night(config, tmp_path, DAY)
    deliver(tmp_path / "raw", DAY, row("a", clicked=1), row("b"))
    deliver(tmp_path / "raw", NEXT, row("c", day=NEXT))
    _, made = night(config, tmp_path, NEXT)

    assert {name: checks.figures_of(made)[name] for name in ("read", "duplicates")} == {"read": 1, "duplicates": 0}


def test_replace_needs_days_to_look_back() -> None:
    """Without restate_days nothing is ever read again, which is refused by name."""
    with pytest.raises(ConfigError, match=r"source\.restate_days above 0"):
        feeds.make_config(Path("raw"), restate="replace")


def test_days_are_told_by_what_they_were_read_from(tmp_path: Path) -> None:
    """The record holds the digest of each feed day's files."""
    config = config_of(tmp_path / "raw")
    deliver(tmp_path / "raw", DAY, row("a"))
    table, made = night(config, tmp_path, DAY)
    files = list_files(config, DAY, config.source.feeds[0])

    assert made.inputs == {DAY.isoformat(): contract.identity(files)}
    assert table.delivered(DAY.isoformat()) == (contract.identity(files), [1])
    assert table.delivered(NEXT.isoformat()) == ("", [])
