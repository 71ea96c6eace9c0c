"""From what is known of the evaluated events to slices, as `evaluation.slices` parts them; and slices as a table. Polars."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

from gr_core.config import SliceConfig
from gr_core.eval.metrics import Array
from gr_core.eval.slices import COUNTS, ERRORS, METRICS, Slicing

UNKNOWN, OTHER = "unknown", "other"
TABLE = pl.Schema(
    {
        "night": pl.String,
        "role": pl.String,
        "model": pl.Int64,
        "action": pl.String,
        "slice": pl.String,
        "metric": pl.String,
        "value": pl.Float64,
        "error": pl.Float64,
        "count": pl.Int64,
        "positives": pl.Int64,
        "users": pl.Int64,
    }
)
"""One row a (night, role, model, action, slice, metric): value (null: undefined), standard error over users where there is
one, and the counts of rows, positives and users."""


def by_feature(config: SliceConfig, values: pl.Series) -> Slicing:
    """Part rows by a side feature's text: the named or most frequent values, then the rest, where there is any.

    Args:
        config: A slicing by = "feature".
        values: Its value of each row [N]; null is the slice `unknown`.
    """
    filled = values.cast(pl.String).fill_null(UNKNOWN).alias("value")
    labels = list(config.values)
    if not labels:
        ranked = filled.value_counts(name="rows").sort(["rows", "value"], descending=[True, False])
        labels = sorted(ranked["value"].head(config.max_values))
    number = {label: place for place, label in enumerate(labels)}
    rest = number.get(OTHER, len(labels))
    place = np.array([number.get(value, rest) for value in filled], np.int64)
    if rest == len(labels) and (place == rest).any():
        labels.append(OTHER)
    return Slicing(config.name, tuple(labels), place, config.veto)


def by_history(config: SliceConfig, history: Array) -> Slicing:
    """Part rows by how many history entries each sees, int [N]."""
    place = np.searchsorted(np.asarray(config.bounds), history, side="right")
    return Slicing(config.name, config.labels, place, config.veto)


def by_items(config: SliceConfig, is_new: Array) -> Slicing:
    """Part rows by whether their item is new, bool [N]."""
    return Slicing(config.name, ("new", "known"), np.where(is_new, 0, 1), config.veto)


def by_day(times: Array, zone: str) -> Slicing:
    """Part rows by lake day.

    Args:
        times: shown_at, microseconds since the epoch [N].
        zone: The lake's.
    """
    shown = pl.Series("day", np.asarray(times), dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    days = shown.dt.convert_time_zone(str(ZoneInfo(zone))).dt.date().cast(pl.String)
    labels, place = np.unique(days.to_numpy().astype(str), return_inverse=True)
    return Slicing("day", tuple(labels.tolist()), place)


def long_table(night: str, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return rows of `slices.measure`, which name their role and model, as a TABLE, one metric a row."""
    found = [
        {
            "night": night,
            **{key: row[key] for key in ("role", "model", "action", "slice")},
            "metric": metric,
            "value": row[metric],
            "error": row.get(ERRORS.get(metric, "")),
            **{key: row[key] for key in COUNTS[:3]},
        }
        for row in rows
        for metric in METRICS
    ]
    return pl.DataFrame(found, schema=TABLE)


def as_parquet(table: pl.DataFrame) -> bytes:
    """Return a table as a Parquet file; equal tables give equal bytes."""
    content = io.BytesIO()
    table.write_parquet(content, compression="zstd")
    return content.getvalue()


def as_csv(table: pl.DataFrame) -> str:
    """Return a table as text that MLflow shows as a table."""
    return table.write_csv()


def keys_of(events: Sequence[tuple[str, int, str]]) -> pl.DataFrame:
    """Return `Scored.events` as columns user_id, shown_at (us) and event_id [N]."""
    schema = {"user_id": pl.String, "shown_at": pl.Int64, "event_id": pl.String}
    return pl.DataFrame(events, schema=schema, orient="row")
