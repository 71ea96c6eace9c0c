"""Side tables: joined by key, as of the newest complete snapshot."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl

from gr_core.config import Config, parse_config
from gr_core.data.contract import Batch, read_day
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
