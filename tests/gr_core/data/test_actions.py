"""The contract of an actions feed: what its rows become, and why some go to quarantine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config
from gr_core.data.actions import ActionBatch, concat, read_actions
from gr_core.data.contract import read_day
from gr_core.errors import ConfigError, DataContractError
from gr_core.lake.source import list_files
from tests import shop
from tests.feeds import ms
from tests.shop import BUY, CLICK, DAY, NOON, action, make_config, write_actions


def read(config: Config, day: Any = DAY) -> ActionBatch:
    feed = config.source.feeds[1]
    batch = read_actions(config, day, list_files(config, day, feed), feed=feed)
    batch.check()
    return batch


def reasons(batch: ActionBatch) -> dict[str, int]:
    return dict(batch.quarantine.group_by("reason").len().sort("reason").iter_rows())


def test_a_row_is_key_actions_and_time(tmp_path: Path) -> None:
    """Example 4.2: key columns joined with ":", SQL an action, wall time of the declared zone."""
    rows = [action("r1", "click", "2025-06-01 08:00:40"), action("r2", "order", "2025-06-01 09:00:00", pos=12)]
    write_actions(tmp_path, DAY, rows)
    batch = read(make_config(tmp_path))
    assert batch.rows.select("event_id", "actions", "acted_at", "feed").rows() == [
        ("r1:1", CLICK, NOON + timedelta(seconds=40), "actions"),
        ("r2:12", BUY, NOON + timedelta(hours=1), "actions"),
    ]
    assert (batch.read, batch.quarantine.height) == (2, 0)


@pytest.mark.parametrize(
    ("wall", "instant"),
    [
        ("2025-03-09 01:59:59", datetime(2025, 3, 9, 6, 59, 59, tzinfo=UTC)),
        ("2025-03-09 02:30:00", None),
        ("2025-03-09 03:00:00", datetime(2025, 3, 9, 7, tzinfo=UTC)),
        ("2025-11-02 01:30:00", datetime(2025, 11, 2, 5, 30, tzinfo=UTC)),
        ("2025-11-02 02:00:00", datetime(2025, 11, 2, 7, tzinfo=UTC)),
    ],
)
def test_wall_times_across_a_clock_change(tmp_path: Path, wall: str, instant: datetime | None) -> None:
    """An hour that does not exist is bad_time, of one that exists twice the earlier counts."""
    day = datetime.fromisoformat(wall).date()
    write_actions(tmp_path, day, [action("r1", "click", wall), action("r1", "click", f"{day} 12:00:00")])
    batch = read(make_config(tmp_path), day)
    found = batch.rows["acted_at"].to_list()[:-1]
    assert found == ([] if instant is None else [instant])
    assert reasons(batch) == ({"bad_time": 1} if instant is None else {})


def test_broken_rows_go_to_quarantine_with_a_reason(tmp_path: Path) -> None:
    """Each row read is a usable row or has a reason; rows that are no action are told by their declared columns."""
    late = datetime(2025, 6, 2, 6, tzinfo=UTC)  # the day ends at 04:00Z in New York, the skew is two hours
    rows = [
        action("r1", "click", NOON),
        action("r1", "click", late),
        action("r1", "click", late + timedelta(seconds=1)),
        action("r1", "view", NOON),
        action(None, "click", NOON),
        action("r1", "click", NOON, pos="x"),
        action("r1", "click", None),
        action("r1", "click", "yesterday"),
        action("r1", "order", None),  # the SQL of buy asks for a time
        '{"req": "r1", "pos"',
    ]
    write_actions(tmp_path, DAY, rows)
    batch = read(make_config(tmp_path))
    assert batch.rows["acted_at"].to_list() == [NOON, late]
    assert reasons(batch) == {
        "bad_row": 1,
        "bad_time": 1,
        "bad_value": 1,
        "clock_skew": 1,
        "no_action": 2,
        "null_id": 1,
        "null_time": 1,
    }
    told = dict(
        batch.quarantine.filter(pl.col("reason").is_in(["bad_row", "clock_skew"])).select("reason", "row").rows()
    )
    assert told["bad_row"] == '{"req": "r1", "pos"'
    assert '"kind":"click"' in told["clock_skew"]


def test_a_time_beyond_the_calendar_costs_its_row(tmp_path: Path) -> None:
    """Whatever the reason that a row is put aside for, its time is told as the number it is."""
    columns = {"req": ["r1", "r2", "r3"], "pos": [1, 1, 1], "kind": ["click", "order", "view"]}
    stamps = pl.Series("at", [ms(NOON), 2**63 - 1, -(2**63) + 1], dtype=pl.Int64).cast(pl.Datetime("ms"))
    path = tmp_path / f"dt={DAY}" / "a.parquet"
    path.parent.mkdir()
    pl.DataFrame(columns).with_columns(stamps).write_parquet(path)
    feed = {"path": "dt={date}/*.parquet", "format": "parquet", "types": {}, "acted_at": {"column": "at"}}
    batch = read(make_config(tmp_path, actions=feed))

    assert batch.rows["event_id"].to_list() == ["r1:1"]
    assert reasons(batch) == {"bad_time": 1, "no_action": 1}
    assert all(str(2**63 - 1) in row for row in batch.quarantine["row"])


def test_keys_meet_as_text(tmp_path: Path) -> None:
    """A position that one feed writes as a number and the other as text is one key; an empty one is none."""
    types = {**shop.ACTIONS["types"], "pos": "string"}
    write_actions(tmp_path, DAY, [action("r1", "click", NOON, pos="7"), action("r1", "click", NOON, pos="")])
    batch = read(make_config(tmp_path, actions={"types": types}))
    assert batch.rows["event_id"].to_list() == ["r1:7"]
    assert reasons(batch) == {"null_id": 1}


def test_a_row_may_be_several_actions(tmp_path: Path) -> None:
    """A row on which two actions' SQL is true has both bits and counts once."""
    write_actions(tmp_path, DAY, [action("r1", "order", NOON)])
    both = {"click": "kind IN ('click', 'order')", "buy": "kind = 'order'"}
    batch = read(make_config(tmp_path, actions={"actions": both}))
    assert (batch.rows["actions"].to_list(), batch.read) == ([CLICK | BUY], 1)


def test_a_day_of_which_nothing_can_be_read_stops(tmp_path: Path) -> None:
    """A wrong time format would make every impression an ignored one for good; a day of other rows is a day."""
    write_actions(tmp_path, DAY, [action("r1", "click", "06/01/2025")])
    with pytest.raises(
        DataContractError, match=r"feed actions of 2025-06-01: none of the 1 rows .*bad_time 1.*acted_at"
    ):
        read(make_config(tmp_path))
    write_actions(tmp_path, DAY, [action("r1", "view", NOON)])
    assert reasons(read(make_config(tmp_path))) == {"no_action": 1}


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    """A key column without a declared type, which an ndjson does not bring by itself, stops with its name."""
    write_actions(tmp_path, DAY, [action("r1", "click", NOON)])
    types = {name: kind for name, kind in shop.ACTIONS["types"].items() if name != "pos"}
    with pytest.raises(DataContractError, match=r"column pos is missing, source.feeds\[actions\].on needs it"):
        read(make_config(tmp_path, actions={"types": types}))


def test_no_batch_is_an_empty_batch(tmp_path: Path) -> None:
    """Several feeds' batches add up, also none of them, and a day without a file."""
    assert concat([]).read == 0
    assert read(make_config(tmp_path)).rows.is_empty()
    write_actions(tmp_path, DAY, [action("r1", "click", NOON), action("r1", "view", NOON)])
    one = read(make_config(tmp_path))
    both = concat([one, one])
    both.check()
    assert (both.read, both.rows.height, both.quarantine.height) == (4, 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"click": 0}, r"\['click'\] must have attribution_window_seconds above 0"),
        ({"actions": {"on": ["req"]}}, r"source.feeds\[actions\].on must have one column for each"),
        ({"actions": {"actions": {"share": "kind = 'share'"}}}, r"actions \['share'\] are not in source.actions"),
        ({"actions": {"actions": {}}}, "needs acted_at, on and actions"),
        ({"actions": {"side": {"surface": "page"}}}, r"an actions feed has no \['side'\]"),
        ({"impressions": {"on": ["req", "pos"]}}, "on and acted_at belong to a feed with role actions"),
    ],
)
def test_configs_that_cannot_be_joined_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Keys of another length, actions without a window and declarations that nothing reads are named at once."""
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, **changes)


def test_one_id_column_is_one_key_column(tmp_path: Path) -> None:
    """An events feed with an id of its own is joined by one column."""
    feed = {"event_key": [], "event_id": "req"}
    config = make_config(tmp_path, impressions=feed, actions={"on": ["req"]})
    write_actions(tmp_path, DAY, [action("r1", "click", NOON)])
    assert read(config).rows["event_id"].to_list() == ["r1"]


def test_keys_of_pseudonymised_users_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the event's key has the user's id in it, both feeds hash it alike, and no quarantined row shows it."""
    monkeypatch.setenv("DAYBREAK_USER_KEY", "0123456789abcdef")
    types = {**shop.ACTIONS["types"], "uid": "int64"}
    config = make_config(
        tmp_path,
        impressions={"event_key": ["uid", "pos"]},
        actions={"types": types, "on": ["uid", "pos"]},
        source={"pseudonymise_users": True},
    )
    shop.write_impressions(tmp_path, DAY, [shop.impression("r1", uid=987654)])
    kinds = {"click": NOON, "view": NOON, "order": "never"}
    write_actions(tmp_path, DAY, [{**action("r1", kind, at), "uid": 987654} for kind, at in kinds.items()])
    batch, feed = read(config), config.source.feeds[0]
    events = read_day(config, DAY, list_files(config, DAY, feed), feed=feed).events
    assert batch.rows["event_id"].to_list() == events["event_id"].to_list()
    assert reasons(batch) == {"bad_time": 1, "no_action": 1}
    assert not any("987654" in row for row in batch.quarantine["row"])
