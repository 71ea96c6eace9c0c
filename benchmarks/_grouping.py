"""From raw files to sequences in a child process, without what a night needs besides (torch): the peak is the stages' own."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._events import Feed, config_of
from gr_core.data.sequences import build_sequences
from gr_core.lake.events import EventTable
from gr_core.night import Night, open_night
from gr_core.refs import Bound
from gr_core.stages import ingesting, sequencing


def ingest(root: str, home: str, feed: dict[str, Any]) -> dict[str, Any]:
    """Ingest the history and the first night, and nothing else."""
    shape = Feed(**feed)
    night = _night(root, home, shape)
    return dict(ingesting.ingest(night)["rows"])


def group(root: str, home: str, feed: dict[str, Any]) -> dict[str, int]:
    """Group an ingested night's events into the users' sequences, buckets side by side, everything a target.

    A bucket's sequences are dropped when they are built, as they are after the stage has written them.
    """
    shape = Feed(**feed)
    night = _night(root, home, shape)
    config, version = night.settings, Bound.from_json(ingesting.ingest(night)["bound"]).delta_version
    rules = sequencing.sequence_rules(config)

    def targets(bucket: int) -> int:
        rows = EventTable(night.table_uri, config).read(version, buckets=[bucket])
        built = build_sequences(rows, {"train": rows["known"]}, rules)
        return int(built.ragged.targets.sum())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"events": sum(pool.map(targets, range(shape.buckets)))}


def sequences(root: str, home: str, feed: dict[str, Any]) -> dict[str, int]:
    """Run the sequences stage of an ingested night: all roles, files and history store, buckets side by side."""
    shape = Feed(**feed)
    night = _night(root, home, shape)
    ingested = ingesting.ingest(night)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        buckets = list(pool.map(lambda b: sequencing.build_bucket(night, ingested, b), range(shape.buckets)))
    return {"targets": sum(bucket["counts"]["train"] for bucket in buckets)}


def _night(root: str, home: str, feed: Feed) -> Night:
    config = config_of(Path(root), feed)
    return open_night(config, home, feed.first_night, at_us=time.time_ns() // 1000, mode="backfill")
