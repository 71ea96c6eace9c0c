"""A tiny raw feed with its config: seconds a night, for tests of the flow and the command line."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIRST_DAY = date(2025, 6, 1)
ROWS_A_DAY = 600

CONFIG = """
name = "tiny"
[lake]
zone = "UTC"
num_buckets = 2
holdout_fraction = 0.25
[source]
root = "{root}"
visibility_delay_seconds = 60
daily_cap = 1000
[[source.actions]]
name = "click"
attribution_window_seconds = 1800
[[source.actions]]
name = "like"
[[source.feeds]]
name = "log"
path = "log/date={{date}}/*.parquet"
event_id = "id"
shown_at = {{ column = "ts", unit = "ms", zone = "UTC" }}
  [source.feeds.columns]
  user_id = "uid"
  item_id = "item"
  [source.feeds.actions]
  click = "clicked"
  like = "liked"
  [source.feeds.side]
  surface = "surface"
[sequences]
max_history = 16
max_targets = 16
[vocabulary.item_id]
min_count = 1
[vocabulary.surface]
min_count = 1
[pack]
token_budget = 128
[model]
width = 16
num_layers = 2
num_heads = 2
item_features = ["item_id"]
context_features = ["surface"]
[train]
dense_learning_rate = 1e-2
num_threads = 1
[gate]
min_positives = 5
margin = 0.5
confidence = 0.8
calibration = [0.2, 5.0]
insufficient_data = "promote_if_sane"
num_resamples = 100
"""


def write_day(root: Path, day: date, *, rows: int = ROWS_A_DAY, users: int = 40, items: int = 12) -> Path:
    """Write one raw file: click odds depend on the user, which history shows and item counts do not; 3 rows repeat."""
    rng = np.random.default_rng(day.toordinal())
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    item, user = rng.integers(0, items, rows), rng.integers(0, users, rows)
    clicked = rng.random(rows) < np.where(user % 2 == 0, 0.9, 0.1)
    table = pa.table(
        {
            "id": [f"{day}-{n}" for n in range(rows)],
            "uid": pa.array(user),
            "item": pa.array(item),
            "ts": pa.array(start + rng.integers(0, 86_400_000, rows)),
            "clicked": pa.array(clicked),
            "liked": pa.array(clicked & (rng.random(rows) < 0.3)),
            "surface": pa.array(rng.choice(["home", "search"], rows)),
        }
    )
    table = pa.concat_tables([table, table.slice(0, 3)]) if rows >= 3 else table
    path = root / "log" / f"date={day}" / "part-0.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def make(folder: Path, *, days: int = 3) -> Path:
    """Write a config and the raw files of some days below a folder; returns the config's path."""
    for n in range(days):
        write_day(folder / "raw", FIRST_DAY + timedelta(days=n))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(root=folder / "raw"))
    return path
