"""How a batch meets the event table: repeats update, new events enter up to the daily cap. Pure frames.

In: a batch's events and the table's rows with the same event ids. Out: rows to insert, rows to update, rows over
the cap, and counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from gr_core.config import Config
from gr_core.hashing import is_holdout
from gr_core.refs import Bound
from gr_core.schema import action_time


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What repeats of events in the table change."""

    rows: pl.DataFrame
    """Events that change: the table's rows with their new actions, known and action times."""
    labels_changed: int
    """Known bits that changed inside the parent's bound, for users that are trained on."""


def lake_day(zone: str) -> pl.Expr:
    """Return the lake day of `shown_at`."""
    return pl.col("shown_at").dt.convert_time_zone(zone).dt.date().alias("day")


def updates(config: Config, old: pl.DataFrame, new: pl.DataFrame, parent: Bound | None) -> Updates:
    """Work out what repeated events teach the table: every bit known in the new row, with its action time.

    Args:
        config: The run's config.
        old: The table's rows, one an event_id.
        new: The batch's rows with the same event_ids.
        parent: Watermark of the night's parent.

    Returns:
        The changed events only; bits that the new row does not know stay as they are.
    """
    names = config.source.action_names
    pairs = old.join(new, on="event_id", how="inner", suffix="_new", maintain_order="left")
    told = pl.col("known_new")
    changes = [
        ((pl.col("actions") & ~told) | (pl.col("actions_new") & told)).alias("actions"),
        (pl.col("known") | told).alias("known"),
        *(
            pl.when((told & (1 << bit)) != 0)
            .then(pl.col(f"{action_time(name)}_new"))
            .otherwise(pl.col(action_time(name)))
            .alias(action_time(name))
            for bit, name in enumerate(names)
        ),
    ]
    learnt = [change.meta.output_name() for change in changes]
    flipped = (pl.col("actions") ^ pl.col("actions_new")) & pl.col("known") & told
    after = pairs.with_columns(*changes, flipped.alias("flipped"))
    changed = pl.any_horizontal(after[name].ne_missing(pairs[name]) for name in learnt)
    after = after.filter(changed)
    return Updates(
        rows=after.select(old.columns),
        labels_changed=_supervised(config, after, parent),
    )


def _supervised(config: Config, changed: pl.DataFrame, parent: Bound | None) -> int:
    """Count flipped bits inside the parent's bound; holdout users were never supervised."""
    flipped = changed.filter(pl.col("flipped") != 0)
    if parent is None or flipped.is_empty():
        return 0
    fraction = config.lake.holdout_fraction
    held = [user for user in flipped["user_id"].unique() if is_holdout(user, fraction)]
    trained = ~flipped["user_id"].is_in(pl.Series(held, dtype=pl.String).implode())
    flipped = flipped.filter(trained & (flipped["commit"] <= parent.commit))
    shown = pl.col("shown_at").dt.timestamp("us")
    inside = [
        ((pl.col("flipped") & (1 << bit)) != 0) & (shown < parent.shown_before_us[name])
        for bit, name in enumerate(config.source.action_names)
        if name in parent.shown_before_us
    ]
    if not inside:
        return 0
    return int(flipped.select(pl.sum_horizontal(bit.cast(pl.Int64) for bit in inside).sum()).item())


def capped(config: Config, rows: pl.DataFrame, counts: pl.DataFrame) -> pl.Series:
    """Tell which new events fit under the daily cap of their user and lake day: the earliest by (shown_at, event_id).

    Args:
        config: The run's config.
        rows: New events of one bucket, by cluster (`lake.clusters`), then by user_id.
        counts: user_id, day, count: events already in the table.

    Returns:
        One boolean a row, in the rows' order.
    """
    # a lake day lies in at most two clusters, in each of which a user's rows are one run
    runs = rows["user_id"].hash().rle().struct.field("len")
    if counts.is_empty() and (2 * runs <= config.source.daily_cap).all():
        return pl.repeat(value=True, n=rows.height, eager=True, dtype=pl.Boolean)
    days = rows.select("user_id", "shown_at", "event_id", lake_day(config.lake.zone))
    asked = days.group_by("user_id", "day").len().join(counts, on=["user_id", "day"], how="left")
    if asked.select(pl.col("len") + pl.col("count").fill_null(0)).to_series().le(config.source.daily_cap).all():
        return pl.repeat(value=True, n=rows.height, eager=True, dtype=pl.Boolean)
    order = (
        days.with_row_index("place")
        .sort("user_id", "day", "shown_at", "event_id")
        .with_columns(pl.int_range(pl.len()).over("user_id", "day").alias("rank"))
        .join(counts, on=["user_id", "day"], how="left", maintain_order="left")
        .sort("place")
    )
    return order.select(
        (pl.col("rank") + pl.col("count").fill_null(0) < config.source.daily_cap).alias("fits")
    ).to_series()
