"""Raw feeds of a few rows: their config, the rows with what a test changes, files of a day, and the contract's batch."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl

from gr_core.config import Config, parse_config
from gr_core.data.batch import Batch
from gr_core.data.contract import read_day
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
    """Return the config of one feed, FEED with a test's changes, below a root."""
    actions = source.pop("actions", [{"name": "click"}, {"name": "like"}, {"name": "buy"}])
    feeds = [{**FEED, **(feed or {})}]
    return parse_config(
        {"name": "t", "lake": lake or {}, "source": {"root": str(root), "actions": actions, "feeds": feeds, **source}}
    )


def ms(moment: datetime) -> int:
    """Return a moment in milliseconds."""
    return round(moment.timestamp() * 1000)


def rows(*changes: dict[str, Any], **schema: Any) -> pl.DataFrame:
    """Return raw rows with the ids e0, e1, ..., one a change."""
    base = {"id": "e", "uid": 1, "item": 7, "ts": ms(NOON), "clicked": 1, "liked": 0}
    numbered = [{**base, "id": f"e{n}", **change} for n, change in enumerate(changes)]
    return pl.DataFrame(numbered, schema_overrides=schema, infer_schema_length=None)


def write(root: Path, *frames: pl.DataFrame, day: date = DAY) -> None:
    """Write frames as the parquet parts of a day."""
    for place, frame in enumerate(frames):
        path = root / f"dt={day}" / f"part-{place}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.write_parquet(path)


def read(config: Config, day: date = DAY) -> Batch:
    """Read a day into contract rows, and check that its counts add up."""
    feed = config.source.feeds[0]
    batch = read_day(config, day, list_files(config, day, feed), feed=feed)
    batch.check()
    return batch


def windowed(**windows: int) -> Config:
    """Return a config of actions with attribution windows in seconds; nothing is read by it."""
    actions = [{"name": name, "attribution_window_seconds": seconds} for name, seconds in windows.items()]
    feed = {
        "name": "log",
        "path": "*.parquet",
        "event_id": "id",
        "shown_at": {"column": "t"},
        "columns": {"user_id": "u", "item_id": "i"},
    }
    source = {"root": "raw", "actions": actions, "feeds": [feed]}
    return parse_config({"name": "test", "source": source, "gate": {"action": actions[0]["name"]}})
