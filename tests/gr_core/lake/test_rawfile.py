"""Raw files of every format and width read alike, and one bad value costs one row."""

from __future__ import annotations

import gzip
import itertools
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.config import Config, parse_config
from gr_core.data.contract import Batch, read_day
from gr_core.errors import DataContractError
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


def test_an_all_null_column_is_read_as_declared(tmp_path: Path) -> None:
    """Case C6: a file whose column has no type, being all null, stands beside one with text."""
    feed = {"side": {"surface": "surface"}}
    write(tmp_path, rows({"surface": None}), rows({"id": "f", "surface": "tv"}))

    assert read(make_config(tmp_path, feed)).events.sort("event_id")["surface"].to_list() == [None, "tv"]
