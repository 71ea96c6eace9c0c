"""From raw rows to contract rows: nothing is lost, nothing depends on the order of rows or files."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from gr_core.errors import DataContractError
from gr_core.lake.merging import lake_day
from tests.feeds import DAY, NOON, make_config, ms, read, rows, write


def test_a_row_becomes_an_event_by_declaration(tmp_path: Path) -> None:
    """Ids are text, masks follow the action list, an action that the feed does not know is unknown."""
    write(tmp_path, rows({"liked": None, "surface": 3}))
    config = make_config(tmp_path, {"side": {"surface": "surface"}}, visibility_delay_seconds=1.5)
    batch = read(config)

    assert batch.events.drop("bucket").rows(named=True) == [
        {
            "event_id": "e0",
            "user_id": "1",
            "item_id": "7",
            "shown_at": NOON,
            "visible_at": NOON + timedelta(seconds=1.5),
            "actions": 0b001,
            "known": 0b001,
            "click_at": None,
            "like_at": None,
            "buy_at": None,
            "surface": "3",
            "request_id": None,
        }
    ]
    assert batch.files.to_list() == [str(tmp_path / "dt=2025-06-01/part-0.parquet")]
    assert (batch.read, batch.duplicates, batch.quarantine.height) == (1, 0, 0)


def test_big_integer_ids_survive_beside_a_null(tmp_path: Path) -> None:
    """Case C7: 9007199254740993 stays exact; the null row goes to quarantine with its raw values."""
    write(tmp_path, rows({"uid": 9007199254740993}, {"uid": None, "item": 2**62 + 1}))
    batch = read(make_config(tmp_path))

    assert batch.events["user_id"].to_list() == ["9007199254740993"]
    assert batch.reasons == {"null_user": 1}
    (bad,) = batch.quarantine.rows(named=True)
    assert json.loads(bad["row"]) == {
        "id": "e1",
        "uid": None,
        "item": 2**62 + 1,
        "ts": ms(NOON),
        "clicked": 1,
        "liked": 0,
    }
    assert (bad["feed"], bad["file"]) == ("log", str(tmp_path / "dt=2025-06-01/part-0.parquet"))


def test_a_null_flag_is_unknown_and_drops_nothing(tmp_path: Path) -> None:
    """Case D10: `flag != 'bot'` keeps the row whose flag is null; its bit is unknown, not 0."""
    write(tmp_path, rows({"flag": "bot"}, {"flag": None}, {"flag": "ok"}))
    events = read(make_config(tmp_path, {"actions": {"click": "flag != 'bot'"}})).events.sort("event_id")

    assert events.select("actions", "known").rows() == [(0, 1), (0, 0), (1, 1)]


def test_rows_that_break_the_contract_have_a_reason(tmp_path: Path) -> None:
    """One reason a row, the first that holds; times in a wrong unit are bad, not old."""
    write(
        tmp_path,
        rows(
            {},
            {"uid": None, "item": None},
            {"item": None},
            {"id": None},
            {"ts": None},
            {"ts": ms(NOON) // 1000},
            {"ts": ms(NOON) * 1000},
            {"ts": -5},
            {"ts": 2**63 - 1},
            {"ts": ms(NOON + timedelta(days=400))},
            {"id": ""},
            uid=pl.Int64,
        ),
    )
    batch = read(make_config(tmp_path))

    assert batch.read == 11
    assert batch.events["event_id"].to_list() == ["e0"]
    assert batch.reasons == {
        "null_user": 1,
        "null_item": 1,
        "null_id": 2,
        "null_time": 1,
        "bad_time": 4,
        "clock_skew": 1,
    }


def test_clock_skew_has_a_closed_border(tmp_path: Path) -> None:
    """Case E4: exactly D+1 02:00:00 with two hours of skew is kept; a millisecond more is not, nor 400 days."""
    end = datetime(2025, 6, 2, tzinfo=UTC)
    shown = [end + timedelta(days=400), end + timedelta(hours=2), end + timedelta(hours=2, milliseconds=1)]
    write(tmp_path, rows(*({"ts": ms(moment)} for moment in shown)))
    batch = read(make_config(tmp_path))

    assert batch.events["event_id"].to_list() == ["e1"]
    assert batch.reasons == {"clock_skew": 2}


def test_the_feed_day_ends_in_the_lakes_zone(tmp_path: Path) -> None:
    """In New York the day that the clocks change is 23 or 25 hours long (case D7)."""
    zone = {"zone": "America/New_York"}
    for day, end in [
        (date(2025, 3, 9), datetime(2025, 3, 10, 4, tzinfo=UTC)),
        (date(2025, 11, 2), datetime(2025, 11, 3, 5, tzinfo=UTC)),
    ]:
        write(tmp_path, rows({"ts": ms(end)}, {"ts": ms(end) + 1}), day=day)
        batch = read(make_config(tmp_path, lake=zone, max_clock_skew_seconds=0), day)
        assert batch.events["event_id"].to_list() == ["e0"]


def test_an_event_on_the_border_between_days_belongs_to_the_later_one(tmp_path: Path) -> None:
    """Case D8: shown exactly at D+1 00:00 it counts to lake day D+1, also where it came in the file of D."""
    write(
        tmp_path, rows({"ts": ms(datetime(2025, 6, 2, tzinfo=UTC))}, {"ts": ms(datetime(2025, 6, 2, tzinfo=UTC)) - 1})
    )
    events = read(make_config(tmp_path)).events.sort("event_id")

    assert events.select(lake_day("UTC"))["day"].to_list() == [date(2025, 6, 2), date(2025, 6, 1)]


def test_late_rows_are_kept(tmp_path: Path) -> None:
    """Case E1: a row shown days before its feed day is an event as any other."""
    write(tmp_path, rows({"ts": ms(NOON - timedelta(days=30))}))

    assert read(make_config(tmp_path)).events.height == 1


def test_repeats_inside_a_commit_are_chosen_by_content(tmp_path: Path) -> None:
    """The row that knows most wins, then the one with most actions; file and row order do not matter."""
    variants = [{"liked": None}, {"clicked": 0}, {"clicked": 1}, {"clicked": 1}, {"liked": None, "clicked": 0}]
    for place, order in enumerate([variants, variants[::-1], variants[2:] + variants[:2]]):
        frames = [rows({"id": "e", **change}, liked=pl.Int64) for change in order]
        write(tmp_path / str(place), pl.concat(frames[:2]), pl.concat(frames[2:]))
        batch = read(make_config(tmp_path / str(place)))
        assert batch.events.select("actions", "known").rows() == [(0b01, 0b11)]
        assert batch.duplicates == 4


def test_a_part_uploaded_twice_counts_once(tmp_path: Path) -> None:
    """Case E2: five events twice are five; two clicks on one item in one second with ids of their own are two."""
    part = rows(*({"ts": ms(NOON) + n} for n in range(5)))
    write(tmp_path, part, part, rows({"id": "x"}, {"id": "y"}))
    batch = read(make_config(tmp_path))

    assert (batch.read, batch.events.height, batch.duplicates) == (12, 7, 5)


def test_event_keys_are_joined_and_buckets_are_stable(tmp_path: Path) -> None:
    """Example 8: key columns joined by ':'; users 0, 1, 42, 9007199254740993, u7 fall into buckets 6 7 3 6 5 of 8."""
    users = ["0", "1", "42", "9007199254740993", "u7"]
    write(tmp_path / "text", rows(*({"uid": user} for user in users)))
    write(tmp_path / "int", rows({"uid": 14172, "item": 4927, "ts": 1650890112378}, {"uid": 42}))
    feed = {"event_id": None, "event_key": ["uid", "item", "ts"]}
    found = read(make_config(tmp_path / "text", feed)).events
    numbers = read(make_config(tmp_path / "int", feed)).events

    assert dict(found.select("user_id", "bucket").rows()) == dict(zip(users, [6, 7, 3, 6, 5], strict=True))
    assert "14172:4927:1650890112378" in numbers["event_id"].to_list()
    assert numbers.filter(pl.col("user_id") == "42")["bucket"].to_list() == [3]


def test_a_key_with_a_null_part_is_no_id(tmp_path: Path) -> None:
    """A row whose key column is null is quarantined rather than given half an id."""
    write(tmp_path, rows({"req": "a"}, {"req": None}))
    batch = read(make_config(tmp_path, {"event_id": None, "event_key": ["req", "uid"]}))

    assert batch.events["event_id"].to_list() == ["a:1"]
    assert batch.reasons == {"null_id": 1}


def test_visibility_delay_is_sql_or_a_constant(tmp_path: Path) -> None:
    """A null, negative or absurd delay breaks the contract; the feed's own delay wins over the source's."""
    write(tmp_path, rows({"play": 2500}, {"play": None}, {"play": -1}, {"play": 10**15}))
    batch = read(make_config(tmp_path, visibility_delay_seconds="play / 1000"))
    own = read(make_config(tmp_path, {"visibility_delay_seconds": 0}, visibility_delay_seconds="play / 1000"))

    assert (batch.events["visible_at"] - batch.events["shown_at"]).to_list() == [timedelta(seconds=2.5)]
    assert batch.reasons == {"bad_delay": 3}
    assert own.events.height == 4


def test_an_action_outside_its_window_does_not_set_the_bit(tmp_path: Path) -> None:
    """The window is [shown_at, shown_at + window); a bit without a time stays; an unreadable time makes it unknown."""
    start = ms(NOON)
    times = [start - 1, start, start + 1_800_000 - 1, start + 1_800_000, None, 5]
    write(tmp_path, rows(*({"at": at} for at in times), {"clicked": 0, "at": start}))
    actions = [{"name": "click", "attribution_window_seconds": 1800}, {"name": "like"}]
    feed = {"action_times": {"click": {"column": "at", "unit": "ms"}}}
    batch = read(make_config(tmp_path, feed, actions=actions))
    events = batch.events.sort("event_id")

    assert (events["actions"] & 1).to_list() == [0, 1, 1, 0, 1, 0, 0]
    assert (events["known"] & 1).to_list() == [1, 1, 1, 1, 1, 0, 1]
    assert [at is not None for at in events["click_at"]] == [False, True, True, False, False, False, False]
    assert (batch.outside_window, batch.bad_action_times) == (2, 1)


def test_a_final_label_keeps_its_time(tmp_path: Path) -> None:
    """With a window of 0 the label is final in the row: its time is stored and never clears the bit."""
    later = ms(NOON + timedelta(hours=5))
    write(tmp_path, rows({"at": later}))
    events = read(make_config(tmp_path, {"action_times": {"click": {"column": "at", "unit": "ms"}}})).events

    assert events.select("actions", "click_at").rows() == [(1, NOON + timedelta(hours=5))]


def test_a_day_without_files_or_rows_is_an_empty_batch(tmp_path: Path) -> None:
    """Both give a batch of the right columns and zero counts."""
    config = make_config(tmp_path)
    none = read(config)
    write(tmp_path, rows({}).head(0))
    empty = read(config)

    assert (none.read, empty.read, none.reasons) == (0, 0, {})
    assert_frame_equal(none.events, empty.events)
    assert "bucket" in none.events.columns
    assert "commit" not in none.events.columns


def usable(row: dict[str, Any]) -> bool:
    """Tell whether a row of the property below keeps the contract."""
    return None not in (row["id"], row["uid"], row["item"]) and row["ts"] in (ms(NOON), ms(NOON) + 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.fixed_dictionaries(
            {
                "id": st.sampled_from([None, "a", "b", "c", "d"]),
                "uid": st.sampled_from([None, 1, 2**53 + 1]),
                "item": st.sampled_from([None, 0, 7]),
                "ts": st.sampled_from([None, 5, ms(NOON), ms(NOON) + 1, ms(NOON + timedelta(days=3))]),
                "clicked": st.sampled_from([None, 0, 1]),
                "liked": st.sampled_from([None, 0, 1]),
            }
        ),
        max_size=25,
    ),
    seed=st.integers(0, 1000),
)
def test_no_row_is_lost_and_order_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, data: list[dict[str, Any]], seed: int
) -> None:
    """Property: read = events + duplicates + quarantined; shuffled rows, cut into other files, give the same batch."""
    schema = {"id": pl.String, **dict.fromkeys(("uid", "item", "ts", "clicked", "liked"), pl.Int64)}
    shuffled = random.Random(seed).sample(data, len(data))
    cut = seed % (len(data) + 1)
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    write(one, pl.DataFrame(data, schema=schema))
    write(two, pl.DataFrame(shuffled[:cut], schema=schema), pl.DataFrame(shuffled[cut:], schema=schema))
    if data and not any(usable(row) for row in data):
        for root in (one, two):
            with pytest.raises(DataContractError, match=f"none of the {len(data)} rows"):
                read(make_config(root))
        return
    first, second = read(make_config(one)), read(make_config(two))

    assert first.read == len(data)
    assert (first.duplicates, first.reasons) == (second.duplicates, second.reasons)
    assert first.events["event_id"].is_unique().all()
    assert_frame_equal(first.events, second.events)
    told = [batch.quarantine.select("reason", "row").sort("reason", "row") for batch in (first, second)]
    assert_frame_equal(*told)


@pytest.mark.parametrize(
    ("change", "feed", "reason"),
    [
        ({}, {"shown_at": {"column": "ts", "unit": "s"}}, "bad_time 2"),
        ({"uid": None}, {}, "null_user 2"),
        ({"id": None}, {}, "null_id 2"),
        ({"ts": ms(NOON + timedelta(days=9))}, {}, "clock_skew 2"),
    ],
)
def test_a_day_without_one_usable_row_is_an_error(
    tmp_path: Path, change: dict[str, Any], feed: dict[str, Any], reason: str
) -> None:
    """A wrong unit or a lost id column never becomes an empty day: feed, day, reasons, first file and remedy are told."""
    write(tmp_path, rows({}, {}).with_columns(pl.lit(value).cast(pl.Int64).alias(n) for n, value in change.items()))

    with pytest.raises(DataContractError) as caught:
        read(make_config(tmp_path, feed))

    told = caught.value.message
    for word in ("feed log of 2025-06-01", "2 rows", reason, "part-0.parquet", "source.feeds[log]", "unit"):
        assert word in told, told
    assert caught.value.where == str(tmp_path / f"dt={DAY}" / "part-0.parquet")


def test_one_usable_row_is_enough(tmp_path: Path) -> None:
    """With one good row, also one that others repeat, the rest is quarantined as ever."""
    write(tmp_path, rows({"id": "a"}, {"id": "a"}, {"uid": None}, {"ts": 5}))
    batch = read(make_config(tmp_path))

    assert (batch.events.height, batch.duplicates, batch.reasons) == (1, 1, {"bad_time": 1, "null_user": 1})
