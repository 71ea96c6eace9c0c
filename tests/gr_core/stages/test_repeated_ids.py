"""An event_id that comes again, further apart than dedup_days, is judged as the event that it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl

from gr_core.eval.scoring import Scored
from gr_core.hashing import is_holdout
from gr_core.stages import gating, rivals
from tests.events import batch, event, make_config, table

LATER = datetime(2025, 9, 1, tzinfo=UTC)
HELD, OTHER = (next(u for u in map(str, range(99)) if is_holdout(u, 0.05) == held) for held in (True, False))


def scored(*events: tuple[str, int, str]) -> Scored:
    """Return what a checkpoint scores of events: each one's row number."""
    rows = np.arange(len(events))
    return Scored(
        logits=rows[:, None].astype(np.float32),
        labels=rows.astype(np.int32),
        label_known=np.ones(len(events), np.int32),
        time=np.array([shown for _, shown, _ in events], np.int64),
        users=[user for user, _, _ in events],
        event_ids=[name for _, _, name in events],
        actions=["click"],
        action_bits=[0],
        digest="",
    )


def test_scores_of_the_same_rows_in_another_order_are_paired() -> None:
    """Two users' and two days' events of one id are four rows, and each meets itself."""
    events = [("a", 1, "e"), ("b", 1, "e"), ("a", 2, "e"), ("b", 1, "f")]
    challenger = replace(scored(*events), digest="own")

    found = rivals.aligned(scored(*events[::-1]), challenger)

    assert found.digest == "own"
    assert found.events == events
    assert found.logits[:, 0].tolist() == [3, 2, 1, 0]


def test_a_first_model_is_compared_row_by_row(tmp_path: Path) -> None:
    """Each event gets the rate of its own item, also where another event of the table has its id."""
    config = make_config()
    events = table(tmp_path, config)
    first = [event("e", HELD, item_id="i1"), event("f", OTHER, item_id="i1", actions=1)]
    events.ingest("2025-06-01", batch(config, *first), parent=None)
    again = [event("e", HELD, item_id="i2", shown_at=LATER), event("g", OTHER, item_id="i2", shown_at=LATER)]
    made = events.ingest("2025-09-01", batch(config, *again), parent=None)
    night: Any = SimpleNamespace(table_uri=events.uri)
    watermark = {"delta_version": made.delta_version, "commit": made.number, "shown_before_us": {"click": 2**62}}
    rows = events.read(made.delta_version).filter(pl.col("event_id") == "e")
    judged = rows.select("user_id", pl.col("shown_at").dt.epoch("us"), "event_id")

    rates = gating.smoothed_counts(night, config, {"watermark": watermark}, judged)

    assert rates.tolist() == [(1 + 20 * 0.5) / 21, (0 + 20 * 0.5) / 21]
