"""Arrow schemas of what is stored: event table, quarantine, pack. The one place that names columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

EVENT_FORMAT = 2
PACK_FORMAT = 1
TIME = pa.timestamp("us", tz="UTC")

PAD_ROW = 0
UNKNOWN_ROW = 1
FIRST_FALLBACK_ROW = 2

DUE, REPLAYED = 1, 2
"""A pack's `supervise` on targets: due this night, or trained on again (train.replay_fraction); 0 on history."""


def action_time(action: str) -> str:
    """Name the event table's column with the time an action was taken (null: known at visible_at)."""
    return f"{action}_at"


def event_schema(actions: Sequence[str], side_features: Sequence[str]) -> pa.Schema:
    """Return the event table's schema.

    Ids and side features are text: the vocabulary is exact, 64-bit integers survive, and 7 and "7" hash alike.
    The masks are int32 (Delta has no unsigned type), bit number = place in `actions`. `commit` is the number of the
    ingestion that brought the row and never changes; `updated` that of the last one that changed it (commit at first).
    """
    return pa.schema(
        [
            pa.field("event_id", pa.string(), nullable=False),
            pa.field("user_id", pa.string(), nullable=False),
            pa.field("item_id", pa.string(), nullable=False),
            pa.field("shown_at", TIME, nullable=False),
            pa.field("visible_at", TIME, nullable=False),
            pa.field("actions", pa.int32(), nullable=False),
            pa.field("known", pa.int32(), nullable=False),
            *(pa.field(action_time(name), TIME) for name in actions),
            *(pa.field(name, pa.string()) for name in side_features),
            pa.field("request_id", pa.string()),
            pa.field("commit", pa.int64(), nullable=False),
            pa.field("updated", pa.int64(), nullable=False),
            pa.field("bucket", pa.int32(), nullable=False),
        ]
    )


PACK_COLUMNS: dict[str, pa.DataType] = {
    "actions": pa.int32(),
    "known": pa.int32(),
    "labels": pa.int32(),
    "label_known": pa.int32(),
    "time": pa.int64(),
    "position": pa.int32(),
    "lo": pa.int32(),
    "hi": pa.int32(),
    "supervise": pa.uint8(),
    "weight": pa.float32(),
}


def pack_schema(features: Sequence[str]) -> pa.Schema:
    """Return a pack's schema: one int32 row column per feature, then `PACK_COLUMNS`; no nulls, no bools."""
    fields = [(name, pa.int32()) for name in features] + list(PACK_COLUMNS.items())
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
