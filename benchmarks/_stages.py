"""A night's data stages in a child process."""

from __future__ import annotations

import os
from datetime import date as Date
from pathlib import Path
from typing import Any

from benchmarks._events import Feed, config_of
from benchmarks._nights import open_day, promote, run_data, run_night, unread_checkpoint
from gr_core.config import load_config


def data_night(
    root: str,
    home: str,
    feed: dict[str, Any],
    number: int = 0,
    *,
    bootstrap_due: bool = True,
    workers: int | None = None,
) -> dict[str, Any]:
    """Run a night's data stages and promote what it would have trained.

    Args:
        root: Where the feed was written.
        home: The home.
        feed: The feed's fields.
        number: 0 for the first night.
        bootstrap_due: Whether the history is supervised, or context only.
        workers: Buckets side by side; None: as many as there are cores.

    Returns:
        Seconds by stage, rows of the ingestion, tokens, digests and bytes of the packs.
    """
    shape = Feed(**feed)
    config = config_of(Path(root), shape, bootstrap_due=bootstrap_due)
    night = open_day(config, home, shape.day(shape.num_days - 1 + number))
    data = run_data(night, workers=workers or os.cpu_count() or 1)
    bound = data.ingested["bound"]
    promote(night, data, {"uri": unread_checkpoint(night), "watermark": bound, "digest": f"night-{number}"})
    packs = data.packs.values()
    return {
        "stage_seconds": data.seconds,
        **{key: data.ingested[key] for key in ("rows", "reasons", "bootstrap")},
        "tokens": {pack["role"]: pack["num_tokens"] for pack in packs},
        "segments": {pack["role"]: pack["num_segments"] for pack in packs},
        "digests": {pack["role"]: pack["digest"] for pack in packs},
        "pack_bytes": sum(file.stat().st_size for pack in packs for file in Path(pack["uri"]).iterdir()),
    }


def train_night(config: str, home: str, day: str) -> dict[str, Any]:
    """Run one whole night of a config's file, training included.

    Returns:
        What attribution says of the training (perf/*).
    """
    found = run_night(load_config(config), home, Date.fromisoformat(day))
    metrics: dict[str, Any] = found.trained["metrics"]
    return {key: value for key, value in metrics.items() if key.startswith("perf/")}
