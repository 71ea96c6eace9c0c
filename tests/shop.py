"""A source of two feeds, as example 4.2 has it: its config, its raw files, and nights of it on an event table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from gr_core.config import Config, parse_config

ZONE = "America/New_York"
DAY = date(2025, 6, 1)
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
CLICK, BUY = 0b01, 0b10

IMPRESSIONS: dict[str, Any] = {
    "name": "impressions",
    "path": "impressions/dt={date}/*.csv.gz",
    "format": "csv",
    "types": {
        "req": "string",
        "pos": "int32",
        "uid": "int64",
        "sku": "string",
        "page": "string",
        "ts": "int64",
    },
    "event_key": ["req", "pos"],
    "shown_at": {"column": "ts", "unit": "s", "zone": "UTC"},
    "columns": {"user_id": "uid", "item_id": "sku", "request_id": "req"},
    "side": {"surface": "page"},
}
ACTIONS: dict[str, Any] = {
    "name": "actions",
    "role": "actions",
    "path": "actions/dt={date}/*.ndjson.gz",
    "format": "ndjson",
    "types": {"req": "string", "pos": "int32", "kind": "string", "at": "string"},
    "acted_at": {"column": "at", "format": "%Y-%m-%d %H:%M:%S", "zone": ZONE},
    "on": ["req", "pos"],
    "actions": {"click": "kind = 'click'", "buy": "kind = 'order' AND at IS NOT NULL"},
}


def make_config(root: Path, *, click: int = 1800, buy: int = 86_400, **changes: Any) -> Config:
    """Return the config of example 4.2 below a root, with a test's changes to its sections and feeds."""
    windows = {"click": click, "buy": buy}
    feeds = [{**IMPRESSIONS, **changes.pop("impressions", {})}, {**ACTIONS, **changes.pop("actions", {})}]
    source = {
        "root": str(root),
        "visibility_delay_seconds": 1800,
        "actions": [{"name": name, "attribution_window_seconds": seconds} for name, seconds in windows.items()],
        "feeds": feeds,
        **changes.pop("source", {}),
    }
    lake = {"zone": ZONE, "num_buckets": 2, **changes.pop("lake", {})}
    return parse_config({"name": "shop", "lake": lake, "source": source, **changes})


def impression(req: str, shown: datetime = NOON, *, pos: int = 1, uid: int = 1, **changes: Any) -> dict[str, Any]:
    """Return one raw impression row."""
    row = {"req": req, "pos": pos, "uid": uid, "sku": "s", "page": "home", "ts": round(shown.timestamp())}
    return {**row, **changes}


def action(req: str, kind: str, at: datetime | str | None, *, pos: Any = 1) -> dict[str, Any]:
    """Return one raw action row; a time is written as wall time of the shop's zone."""
    from zoneinfo import ZoneInfo

    text = at.astimezone(ZoneInfo(ZONE)).strftime("%Y-%m-%d %H:%M:%S") if isinstance(at, datetime) else at
    return {"req": req, "pos": pos, "kind": kind, "at": text}


def write_impressions(root: Path, day: date, rows: Sequence[dict[str, Any]], *, part: int = 0) -> Path:
    """Write one csv.gz file of a day."""
    names = list(IMPRESSIONS["types"])
    lines = [",".join(names), *(",".join("" if row[n] is None else str(row[n]) for n in names) for row in rows)]
    path = root / "impressions" / f"dt={day}" / f"part-{part}.csv.gz"
    return _write(path, lines)


def write_actions(root: Path, day: date, rows: Sequence[dict[str, Any] | str], *, part: int = 0) -> Path:
    """Write one ndjson.gz file of a day; text stands as a line of its own."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return _write(root / "actions" / f"dt={day}" / f"part-{part}.ndjson.gz", lines)


def _write(path: Path, lines: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    return path
