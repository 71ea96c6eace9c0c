"""From raw files to sequences in a child process, without what a night needs besides (torch): the peak is the stages' own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks._events import Feed, config_of
from gr_core.night import Night, open_night
from gr_core.stages import ingesting, sequencing


def ingest(root: str, home: str, feed: dict[str, Any]) -> dict[str, Any]:
    """Ingest the history and the first night, and nothing else."""
    shape = Feed(**feed)
    night = _night(root, home, shape)
    return dict(ingesting.ingest(night)["rows"])


def sequences(root: str, home: str, feed: dict[str, Any]) -> dict[str, int]:
    """Build the sequences of an ingested night, one bucket after the other."""
    shape = Feed(**feed)
    night = _night(root, home, shape)
    ingested = ingesting.ingest(night)
    buckets = [sequencing.build_bucket(night, ingested, bucket) for bucket in range(shape.buckets)]
    return {"targets": sum(bucket["counts"]["train"] for bucket in buckets)}


def _night(root: str, home: str, feed: Feed) -> Night:
    config = config_of(Path(root), feed)
    return open_night(config, home, feed.first_night, at_us=time.time_ns() // 1000, mode="backfill")
