"""Ids of a full retrain's vocabulary: counted anew over the whole table, those that were not shown for long left out.

In: rows of the event table, a bucket at a time. Out: counts as `vocabulary.grow` takes them at a lineage's root.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from gr_core.data.vocabulary import COUNTS

SEEN = pl.Schema([*COUNTS.items(), ("newest_us", pl.Int64())])
"""Counts of ids, and when each was shown last (microseconds, UTC)."""


def seen_ids(rows: pl.DataFrame, name: str, by: str | None = None) -> pl.DataFrame:
    """Count the ids of a feature, by type.

    Args:
        rows: Rows of the event table with `shown_at`, the feature and its types' column.
        name: The feature's column.
        by: The column with its ids' types (`fallback_by`); None: no types.

    Returns:
        SEEN; nulls are no ids.
    """
    kind = pl.lit(None, pl.String) if by is None else pl.col(by).cast(pl.String)
    named = rows.select(pl.col(name).cast(pl.String).alias("id"), kind.alias("type"), "shown_at")
    counted = named.drop_nulls("id").group_by("id", "type")
    newest = pl.col("shown_at").max().dt.timestamp("us").alias("newest_us")
    return counted.agg(pl.len().cast(pl.Int64).alias("count"), newest).select(SEEN.names()).cast(SEEN)


def surviving(parts: Sequence[pl.DataFrame], shown_from_us: int | None) -> pl.DataFrame:
    """Sum what buckets have seen, without the ids that nobody was shown since a time.

    Args:
        parts: SEEN of each bucket.
        shown_from_us: Ids last shown before this are left out, whatever their count; None: none are.

    Returns:
        vocabulary.COUNTS by id and type; the parts' order changes nothing.
    """
    seen = pl.concat([SEEN.to_frame(), *parts])
    if shown_from_us is not None:
        seen = seen.filter(pl.col("newest_us").max().over("id") >= shown_from_us)
    return seen.group_by("id", "type").agg(pl.col("count").sum()).sort("id", "type").cast(COUNTS)
