"""From raw rows to contract rows: nothing is lost, nothing depends on the order of rows or files."""

from __future__ import annotations

import gzip
import itertools
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

from gr_core.config import Config, parse_config
from gr_core.data.contract import Batch, read_day
from gr_core.errors import DataContractError
from gr_core.lake.merging import lake_day
from gr_core.lake.source import list_files

DAY = date(2025, 6, 1)
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
FEED: dict[str, Any] = {
    "name": "log",
    "path": "dt={date}/*.parquet",
    "event_id": "id",
    "shown_at": {"column": "ts", "unit": "ms"},
    "columns": {"user_id": "uid", "item_id": "item"},
    "actions": {"click": "clicked = 1", "like": "liked = 1"},
}


def make_config(
    root: Path, feed: dict[str, Any] | None = None, lake: dict[str, Any] | None = None, **source: Any
) -> Config:
    actions = source.pop("actions", [{"name": "click"}, {"name": "like"}, {"name": "buy"}])
    feeds = [{**FEED, **(feed or {})}]
    return parse_config(
        {"name": "t", "lake": lake or {}, "source": {"root": str(root), "actions": actions, "feeds": feeds, **source}}
    )


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def rows(*changes: dict[str, Any], **schema: Any) -> pl.DataFrame:
    base = {"id": "e", "uid": 1, "item": 7, "ts": ms(NOON), "clicked": 1, "liked": 0}
    numbered = [{**base, "id": f"e{n}", **change} for n, change in enumerate(changes)]
    return pl.DataFrame(numbered, schema_overrides=schema, infer_schema_length=None)


def write(root: Path, *frames: pl.DataFrame, day: date = DAY) -> None:
    for place, frame in enumerate(frames):
        path = root / f"dt={day}" / f"part-{place}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.write_parquet(path)


def read(config: Config, day: date = DAY) -> Batch:
    feed = config.source.feeds[0]
    batch = read_day(config, day, list_files(config, day, feed), feed=feed)
    batch.check()
    return batch


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


def test_files_may_differ_in_width_order_and_spare_columns(tmp_path: Path) -> None:
    """Cases C2, C14: int32 beside int64, other column orders, categories and undeclared columns read alike."""
    small = rows({"item": 5}, uid=pl.Int32, item=pl.Int32, clicked=pl.Int8)
    wide = rows({"id": "f", "item": 1099511627776, "uid": 1}).with_columns(spare=pl.lit("x")).select(pl.all().reverse())
    texts = rows({"id": "g", "uid": "1", "item": "5"}, uid=pl.String, item=pl.String).cast({"uid": pl.Categorical})
    results = []
    for place, order in enumerate(itertools.permutations([small, wide, texts])):
        write(tmp_path / str(place), *order)
        results.append(read(make_config(tmp_path / str(place))).events)

    assert sorted(results[0]["item_id"]) == ["1099511627776", "5", "5"]
    assert results[0]["user_id"].to_list() == ["1"] * 3
    for other in results[1:]:
        assert_frame_equal(results[0], other)


def test_a_declared_column_may_be_absent_from_some_files(tmp_path: Path) -> None:
    """Case C2: with its type declared it is null where absent, in both file orders; absent everywhere is an error."""
    feed = {"types": {"liked": "int32"}}
    without, full = rows({}).drop("liked"), rows({"id": "f", "liked": 1})
    for place, order in enumerate([(without, full), (full, without)]):
        write(tmp_path / str(place), *order)
        events = read(make_config(tmp_path / str(place), feed)).events.sort("event_id")
        assert events["known"].to_list() == [0b01, 0b11]
    write(tmp_path / "none", without)
    with pytest.raises(DataContractError, match="column liked is missing"):
        read(make_config(tmp_path / "none", feed))


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


@pytest.mark.parametrize(
    ("values", "time"),
    [
        ([1748779200], {"unit": "s"}),
        ([1748779200 * 10**3], {"unit": "ms"}),
        ([1748779200 * 10**6], {"unit": "us"}),
        ([1748779200 * 10**9 + 999], {"unit": "ns"}),
        (pl.Series([NOON], dtype=pl.Datetime("ns", "UTC")), {}),
        (pl.Series([NOON], dtype=pl.Datetime("ms", "UTC")).dt.convert_time_zone("Asia/Tokyo"), {}),
        (pl.Series([NOON.replace(tzinfo=None)], dtype=pl.Datetime("us")), {}),
        (pl.Series([NOON.replace(tzinfo=None, hour=8)], dtype=pl.Datetime("us")), {"zone": "America/New_York"}),
        (["2025-06-01 08:00:00"], {"format": "%Y-%m-%d %H:%M:%S", "zone": "America/New_York"}),
        (["2025-06-01T14:00:00+0200"], {"format": "%Y-%m-%dT%H:%M:%S%z", "zone": "America/New_York"}),
    ],
)
def test_one_instant_in_every_declaration(tmp_path: Path, values: Any, time: dict[str, Any]) -> None:
    """Cases C5, C12: s, ms, us, ns, zoned, naive and text all give the same instant."""
    write(tmp_path, rows({}).with_columns(pl.Series("ts", values)))
    batch = read(make_config(tmp_path, {"shown_at": {"column": "ts", **time}}))

    assert batch.events["shown_at"].to_list() == [NOON]


def test_text_times_that_cannot_be_are_bad(tmp_path: Path) -> None:
    """Junk, a wall time that the clocks skip, and a year before 2000 are quarantined; a repeated hour is the first."""
    texts = ["junk", "2025-03-09 02:30:00", "1999-12-31 00:00:00", "2024-11-03 01:30:00", None]
    write(tmp_path, rows(*({"ts": text} for text in texts), ts=pl.String))
    shown = {"column": "ts", "format": "%Y-%m-%d %H:%M:%S", "zone": "America/New_York"}
    batch = read(make_config(tmp_path, {"shown_at": shown}))

    assert batch.reasons == {"bad_time": 3, "null_time": 1}
    assert batch.events["shown_at"].to_list() == [datetime(2024, 11, 3, 5, 30, tzinfo=UTC)]


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


def test_an_all_null_column_is_read_as_declared(tmp_path: Path) -> None:
    """Case C6: a file whose column has no type, being all null, stands beside one with text."""
    feed = {"side": {"surface": "surface"}}
    write(tmp_path, rows({"surface": None}), rows({"id": "f", "surface": "tv"}))

    assert read(make_config(tmp_path, feed)).events.sort("event_id")["surface"].to_list() == [None, "tv"]


def test_text_files_lose_a_row_and_not_the_file(tmp_path: Path) -> None:
    """csv.gz and ndjson.gz by declared types: a bad value, a bad time and a line that is no record cost one row each."""
    types = {"id": "string", "uid": "int64", "item": "string", "ts": "int64", "clicked": "int32", "liked": "bool"}
    path = tmp_path / "dt=2025-06-01"
    path.mkdir()
    t = ms(NOON)
    (path / "a.csv.gz").write_bytes(
        gzip.compress(
            f"id,uid,item,ts,clicked,liked\na,9007199254740993,007,{t},1,true\nb,x,1,{t},1,\nc,1,1,junk,1,\n"
            f"d,,1,{t},1,\n".encode()
        )
    )
    lines = [
        f'{{"id": "a", "uid": 9007199254740993, "item": "007", "ts": {t}, "clicked": 1, "liked": true, "new": 1}}',
        f'{{"id": "b", "uid": "x", "item": "1", "ts": {t}}}',
        '{"id": "c", "uid": 1, "item": 1, "ts": "junk"}',
        f'{{"id": "d", "item": 1, "ts": {t}}}',
        "no record",
        "[1]",
    ]
    (path / "a.ndjson.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for form, more in (("csv", {}), ("ndjson", {"bad_row": 2})):
        feed = {"path": f"dt={{date}}/*.{form}.gz", "format": form, "types": types}
        batch = read(make_config(tmp_path, {**feed, "actions": {"click": "clicked = 1", "like": "liked"}}))
        assert batch.events.select("event_id", "user_id", "item_id", "actions").rows() == [
            ("a", "9007199254740993", "007", 0b11)
        ]
        assert batch.reasons == {"bad_value": 1, "bad_time": 1, "null_user": 1, **more}
    assert batch.quarantine.filter(pl.col("reason") == "bad_row")["row"].to_list() == ["[1]", "no record"]


def test_side_features_join_by_key(tmp_path: Path) -> None:
    """Text keys meet integer keys; no row means null and is counted, or quarantined where the table says so."""
    write(tmp_path, rows({"item": 5}, {"item": 6}))
    pl.DataFrame({"vid": ["5", "5", None], "tag": ["b,c", "a,z", "q"]}).write_parquet(tmp_path / "items.parquet")
    table = {
        "name": "items",
        "path": "items.parquet",
        "on": {"item_id": "vid"},
        "side": {"tag": "split_part(tag, ',', 1)", "long": "CASE WHEN tag = 'a,z' THEN 1 ELSE 0 END"},
    }
    batch = read(make_config(tmp_path, tables=[table]))
    strict = read(make_config(tmp_path, tables=[{**table, "missing": "quarantine"}]))

    assert batch.events.sort("event_id").select("tag", "long").rows() == [("a", "1"), (None, None)]
    assert batch.missing_side == {"items": 1}
    assert strict.reasons == {"missing_items": 1}
    assert strict.missing_side == {"items": 0}


def test_snapshots_join_as_of_shown_at(tmp_path: Path) -> None:
    """An event sees the newest snapshot complete before its lake day began, never one of its own day."""
    moments = [datetime(2025, 5, day, 23, tzinfo=UTC) for day in (28, 29, 30, 31)]
    write(tmp_path, rows(*({"ts": ms(moment)} for moment in moments)))
    (tmp_path / "items").mkdir()
    for name in ("2025-05-28", "2025-05-30"):
        pl.DataFrame({"vid": [7], "tag": [name]}).write_parquet(tmp_path / "items" / f"{name}.parquet")
    table = {"name": "items", "path": "items/{date}.parquet", "on": {"item_id": "vid"}, "side": {"tag": "tag"}}
    batch = read(make_config(tmp_path, tables=[table]))

    assert batch.events.sort("event_id")["tag"].to_list() == [None, "2025-05-28", "2025-05-28", "2025-05-30"]
    assert batch.missing_side == {"items": 1}


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
    first, second = read(make_config(one)), read(make_config(two))

    assert first.read == len(data)
    assert (first.duplicates, first.reasons) == (second.duplicates, second.reasons)
    assert first.events["event_id"].is_unique().all()
    assert_frame_equal(first.events, second.events)
    told = [batch.quarantine.select("reason", "row").sort("reason", "row") for batch in (first, second)]
    assert_frame_equal(*told)
