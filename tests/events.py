"""Events as the contract hands them over, in batches, and the event table that takes them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from gr_core.config import Config, parse_config
from gr_core.data.batch import Batch, polars_schema
from gr_core.hashing import bucket_of
from gr_core.lake import quarantine
from gr_core.lake.events import EventTable

NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
CLICK, LIKE = 0b01, 0b10


def make_config(*, actions: tuple[str, ...] = ("click", "like"), side: tuple[str, ...] = (), **changes: Any) -> Config:
    """Return a config of four buckets with these actions and side features."""
    feed = {
        "name": "log",
        "path": "*",
        "event_id": "id",
        "shown_at": {"column": "ts", "unit": "ms"},
        "columns": {"user_id": "uid", "item_id": "item"},
        "side": {name: name for name in side},
    }
    lake = {"num_buckets": 4, "holdout_fraction": 0.2, **changes.pop("lake", {})}
    listed = [{"name": name} for name in actions]
    return parse_config(
        {"name": "t", "lake": lake, "source": {"root": "r", "actions": listed, "feeds": [feed], **changes}}
    )


def event(number: str, user: str = "u", *, actions: int = 0, known: int = 0b11, **changes: Any) -> dict[str, Any]:
    """Return an event's row, all of it at noon."""
    return {
        "event_id": number,
        "user_id": user,
        "item_id": "i",
        "shown_at": NOON,
        "visible_at": NOON,
        "actions": actions,
        "known": known,
        "bucket": bucket_of(user, 4),
        **changes,
    }


def batch(config: Config, *events: dict[str, Any], bad: int = 0, duplicates: int = 0) -> Batch:
    """Return events as the contract hands them over, with so many rows quarantined and repeated."""
    schema = {name: dtype for name, dtype in polars_schema(config).items() if name not in ("commit", "updated")}
    frame = pl.DataFrame(list(events), schema=schema)
    spoilt = {"reason": ["null_user"] * bad, "feed": ["log"] * bad, "file": ["f"] * bad, "row": ["{}"] * bad}
    return Batch(
        feed="log",
        events=frame,
        files=pl.Series(["f"] * frame.height, dtype=pl.String),
        quarantine=pl.DataFrame(spoilt, schema=quarantine.SCHEMA),
        read=frame.height + bad + duplicates,
        duplicates=duplicates,
    )


def table(path: Path, config: Config) -> EventTable:
    """Return the event table of the lake in a folder."""
    return EventTable(str(path / "lake" / "events"), config)


def masks(frame: pl.DataFrame) -> dict[str, tuple[int, int]]:
    """Return each event's actions and known bits."""
    return {row["event_id"]: (row["actions"], row["known"]) for row in frame.iter_rows(named=True)}
