"""The stages of a full retrain in the flow's order, without Prefect; it can stop after any window, as a killed one would."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

from gr_core.config import load_config
from gr_core.data.batches import PackReader
from gr_core.night import Night
from gr_core.retrain import Retrain, next_window, open_retrain, window_night
from gr_core.stages import judging, packing, retraining, sequencing, training

Targets = list[tuple[str, str, int, int]]


def targets(pack: dict[str, Any]) -> Targets:
    """Return (user, event, label_known, labels) of a pack's supervised tokens."""
    event_ids, users = PackReader(Path(pack["uri"])).targets()
    with pa.memory_map(str(Path(pack["uri"]) / "pack.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    rows = zip(*(table[name].to_pylist() for name in ("supervise", "label_known", "labels")), strict=True)
    masks = [(known, labels) for supervise, known, labels in rows if supervise]
    return [(user, event, *mask) for user, event, mask in zip(users, event_ids, masks, strict=True)]


def run(
    config: Path,
    home: Path,
    through: date,
    *overrides: str,
    limit: int | None = None,
    watch: Callable[[Night, dict[str, Any]], None] = lambda _night, _pack: None,
) -> tuple[Retrain, dict[str, Any]]:
    """Open a full retrain and train what is missing of it.

    Args:
        config: Path of the config.
        home: The home.
        through: Its last day.
        overrides: Of the config.
        limit: Train so many windows at most.
        watch: Sees each window's night value and train pack, before files that only it needs are removed.

    Returns:
        The full retrain and its survey.
    """
    retrain = open_retrain(load_config(config, list(overrides)), str(home), through, at_us=1)
    surveyed = retraining.survey(retrain)
    first, trained = date.fromisoformat(surveyed["first"]), 0
    while (window := next_window(retrain, first, retrain.entries())) is not None and trained != limit:
        night = window_night(retrain, window)
        inputs = retraining.start_window(retrain, window)
        buckets = range(night.settings.lake.num_buckets)
        parts = [sequencing.build_bucket(night, inputs, bucket) for bucket in buckets]
        made = None
        if judging.any_due(parts):
            words = surveyed if window.is_planned else packing.grow_vocabulary(night, parts)
            encoded = [packing.encode_bucket(night, part, words, bucket) for bucket, part in enumerate(parts)]
            pack = packing.write_pack(night, inputs, parts, encoded, words, "train")
            watch(night, pack)
            made_by = training.train(night, {"train": pack, "holdout": {"num_supervised": 0}}, words)
            made = {"trained": made_by, "words": words, "seconds": {}}
        retraining.end_window(retrain, window, parts, made)
        trained += 1
    return retrain, surveyed
