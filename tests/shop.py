"""A source of two feeds, as example 4.2 has it: its config, its raw files, and nights of it on an event table."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from gr_core.config import Config, parse_config

ROOT = Path(__file__).resolve().parents[1]
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


# conf/shop.toml at the size of a test
SMALL = """
lake.num_buckets=2
lake.holdout_fraction=0.25
sequences.max_history=16
sequences.max_targets=16
vocabulary.item_id.min_count=1
pack.token_budget=128
model.width=16
model.num_heads=2
train.dense_learning_rate=1e-2
train.num_threads=1
gate.min_positives=5
gate.margin=0.5
gate.confidence=0.8
gate.calibration=[0.2, 5.0]
gate.insufficient_data=promote_if_sane
gate.num_resamples=100
"""


def overrides(root: Path) -> list[str]:
    """Return what makes conf/shop.toml a test's: raw files below a root, and seconds a night."""
    return [f"source.root={root}", *SMALL.split("\n")[1:-1]]


def write_world(root: Path, *, days: int = 2, rows: int = 400) -> dict[str, set[str]]:
    """Write days of a small shop; a tenth of the actions comes in the next day's file, some twice, some wrongly.

    Returns:
        Each event_id's actions inside their windows, as far as the files of these days tell them.
    """
    rng = random.Random(7)
    taken: dict[str, set[str]] = {}
    late: list[dict[str, Any]] = []
    for number in range(days):
        day = DAY + timedelta(days=number)
        start = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(ZONE))
        shown, acted, told = [], late, []
        late = []
        for place in range(rows):
            uid, at = rng.randrange(24), start + timedelta(seconds=rng.randrange(80_000))
            page = rng.choice(["home", "search"])
            shown.append(impression(f"{day}-{place}", at, uid=uid, sku=f"s{rng.randrange(12)}", page=page))
            name = f"{day}-{place}:1"
            taken[name] = set()
            if rng.random() < (0.95 if uid % 2 == 0 else 0.05):
                told.append((name, "click", action(f"{day}-{place}", "click", at + timedelta(seconds=40))))
                if rng.random() < 0.3:
                    told.append((name, "buy", action(f"{day}-{place}", "order", at + timedelta(seconds=600))))
        for name, kind, row in told:
            comes_late = rng.random() < 0.1
            (late if comes_late else acted).append(row)
            if not comes_late or number + 1 < days:
                taken[name].add(kind)
        acted += acted[:3]
        acted.append(action(f"{day}-0", "click", start + timedelta(days=1)))  # its window was over
        acted.append(action(f"{day}-lost", "click", start))
        acted.append(action(f"{day}-1", "view", start))
        write_impressions(root, day, shown)
        write_actions(root, day, acted)
    return taken
