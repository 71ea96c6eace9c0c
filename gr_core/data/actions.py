"""The contract of an actions feed: raw rows in by declaration, actions with key and time out, nothing lost on the way.

In: a day's raw files of the actions feeds. Out: an `ActionBatch`: rows that name an event, one or more actions and
the time they were taken, the rows that break the contract with a reason each, and how many were read. Whether the
event is there is not asked here: `gr_core.data.joining` does that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import Self

import polars as pl

from gr_core.config import Config, FeedConfig
from gr_core.data import expressions, users
from gr_core.data.expressions import INSTANT, Wanted
from gr_core.data.rawrows import REASON, applied, nothing_usable, read_columns
from gr_core.lake import quarantine, rawfile
from gr_core.lake.source import SourceFile, completed, own_schemas
from gr_core.refs import day_end_us

logger = logging.getLogger(__name__)

SCHEMA = pl.Schema(
    {
        "event_id": pl.String(),
        "actions": pl.Int32(),  # the row's action bits, never 0
        "acted_at": INSTANT,
        "feed": pl.String(),
        "file": pl.String(),  # URI
    }
)

_PLACE = "\x00place"
# decided by what the row says: its declared columns tell it, and such rows may be most of a feed
_BY_CONTENT = ("no_action", "clock_skew")


@dataclass(frozen=True, kw_only=True)
class ActionBatch:
    """What the actions feeds' files of a night hold, before they meet the events."""

    rows: pl.DataFrame
    """`SCHEMA`, in the order of feeds, files and lines."""
    quarantine: pl.DataFrame
    """`lake.quarantine.SCHEMA`; reasons bad_row, bad_value, null_id, null_time, bad_time, clock_skew, no_action."""
    read: int
    """Rows in the files: rows + quarantine."""
    cutoff_us: int = 0
    """The night's cutoff, by which it is judged whether an impression may still come."""

    def check(self) -> Self:
        """Raise AssertionError when a row was lost (a fault of ours, never of the data)."""
        if self.read != self.rows.height + self.quarantine.height:
            raise AssertionError(
                f"action rows lost: read {self.read}, rows {self.rows.height}, quarantined {self.quarantine.height}"
            )
        return self


def concat(batches: Iterable[ActionBatch], cutoff_us: int = 0) -> ActionBatch:
    """Return several batches as one of a night with this cutoff, in their order; none at all gives an empty one."""
    parts = list(batches)
    bad = pl.concat([quarantine.SCHEMA.to_frame(), *(part.quarantine for part in parts)])
    return ActionBatch(
        rows=pl.concat([SCHEMA.to_frame(), *(part.rows for part in parts)]),
        quarantine=bad.sort("reason", "feed", "file", "row"),
        read=sum(part.read for part in parts),
        cutoff_us=cutoff_us,
    )


def read_actions(config: Config, day: date, files: list[SourceFile], *, feed: FeedConfig) -> ActionBatch:
    """Read one actions feed's files of a day.

    A row is the actions whose SQL is true on it; one that is none of them (a view in a log of everything) goes to
    quarantine as `no_action`, since each row read must be found again in the counts.

    Args:
        config: The run's config.
        day: The feed day D; rows acted later than its end by more than the allowed skew are quarantined.
        files: Files as listed; those of other feeds and tables are passed over.
        feed: The feed, role actions.

    Returns:
        The batch; no file or no row gives an empty one.

    Raises:
        ConfigError: An expression is wrong.
        DataContractError: A file cannot be read, or lacks or mistypes a column; or there are rows, and not one of
            them keeps the contract.
    """
    own = [file for file in files if file.feed == feed.name]
    present = own_schemas(feed, own)
    check, names = expressions.FeedCheck(config.source, feed), expressions.feed_columns(config.source, feed)
    parts = []
    for file, there, schema in zip(own, present, completed(feed, present), strict=True):
        check(schema, file.uri)
        parts.append(_judged_file(config, day, feed, file, read_columns(feed, file, names, there, schema), schema))
    batch = concat(parts)
    batch.check()
    broken = batch.quarantine.filter(pl.col("reason") != "no_action")
    if batch.read and broken.height == batch.read:
        raise nothing_usable(feed, day, broken["reason"], broken["file"][0])
    logger.debug(
        "actions feed %s of %s: read %d (files %d), usable %d, quarantined %d",
        *(feed.name, day, batch.read, len(own), batch.rows.height, batch.quarantine.height),
    )
    return batch


def _judged_file(
    config: Config,
    day: date,
    feed: FeedConfig,
    file: SourceFile,
    raw: pl.DataFrame,
    schema: dict[str, pl.DataType],
) -> ActionBatch:
    frame = action_rows(config, day, feed, raw, schema).with_row_index(_PLACE)
    good = frame.filter(pl.col(REASON).is_null())
    return ActionBatch(
        rows=good.select("event_id", "actions", "acted_at", feed=pl.lit(feed.name), file=pl.lit(file.uri)),
        quarantine=_quarantine(
            config, feed, file, frame.filter(pl.col(REASON).is_not_null()), raw.drop(rawfile.PROBLEM)
        ),
        read=frame.height,
    )


def action_rows(
    config: Config, day: date, feed: FeedConfig, raw: pl.DataFrame, schema: dict[str, pl.DataType]
) -> pl.DataFrame:
    """Turn one file's raw rows into action rows with a reason (column REASON) where they break the contract."""
    latest_us = day_end_us(day, config.lake.zone) + config.source.max_clock_skew_seconds * 1_000_000
    return _judged(_contract(config, feed, raw, schema, expressions.feed_values(config.source, feed)), latest_us)


def _contract(
    config: Config, feed: FeedConfig, raw: pl.DataFrame, schema: dict[str, pl.DataType], values: list[Wanted]
) -> pl.DataFrame:
    """Turn one file's raw rows into event_id, actions, acted_at, and what the judgement asks besides."""
    _, time = expressions.feed_times(feed)["acted_at"]
    keys = [value for value in values if value.name.startswith("id:")]
    flags = {value.name.removeprefix("action:"): value.expr for value in values if value.name.startswith("action:")}
    bits = [
        flags[name].cast(pl.Boolean).fill_null(value=False).cast(pl.Int32) * (1 << bit)
        for bit, name in enumerate(config.source.action_names)
        if name in flags
    ]
    with applied(values, raw):
        frame = raw.with_columns(
            pl.concat_str([expressions.text(key) for key in keys], separator=":").alias("event_id"),
            pl.sum_horizontal(bits).cast(pl.Int32).alias("actions"),
            expressions.instant(time, schema[time.column]).alias("acted_at"),
            pl.col(time.column).is_null().alias("no_time"),
        )
    # raw columns of these names are no longer needed: key, SQL and time were taken from them at once
    return users.pseudonymised(config, feed, frame).select(
        "event_id", "actions", "acted_at", "no_time", rawfile.PROBLEM
    )


def _judged(frame: pl.DataFrame, latest_us: int) -> pl.DataFrame:
    """Add the reason why a row breaks the contract (null where it does not); the first that holds counts."""
    problem = pl.col(rawfile.PROBLEM)
    reason = (
        pl.when(problem == "bad_row")
        .then(pl.lit("bad_row"))
        .when(problem.is_not_null())
        .then(pl.lit("bad_value"))
        # before key and time: a row of something else needs neither
        .when(pl.col("actions") == 0)
        .then(pl.lit("no_action"))
        .when(pl.col("event_id").is_null())
        .then(pl.lit("null_id"))
        .when("no_time")
        .then(pl.lit("null_time"))
        .when(pl.col("acted_at").is_null())
        .then(pl.lit("bad_time"))
        .when(pl.col("acted_at").dt.timestamp("us") > latest_us)
        .then(pl.lit("clock_skew"))
    )
    return frame.with_columns(reason.alias(REASON))


def _quarantine(
    config: Config, feed: FeedConfig, file: SourceFile, bad: pl.DataFrame, raw: pl.DataFrame
) -> pl.DataFrame:
    """Return broken rows for quarantine: as they stand in the file, or their declared columns where those tell why."""
    told = pl.col(REASON).is_in(_BY_CONTENT)
    whole, declared = bad.filter(~told), bad.filter(told)
    texts = users.raw_rows(config, feed, file.uri, whole[_PLACE].to_list()) if whole.height else []
    hidden = expressions.user_columns(config.source, feed) if config.source.pseudonymise_users else set()
    rows = _as_json(raw.drop(hidden)[declared[_PLACE]])
    parts = [
        pl.DataFrame({"reason": reasons, "row": text}, schema={"reason": pl.String, "row": pl.String})
        for reasons, text in ((whole[REASON], texts), (declared[REASON], rows))
    ]
    found = pl.concat(parts).with_columns(feed=pl.lit(feed.name), file=pl.lit(file.uri))
    return found.select(quarantine.SCHEMA.names())


def _as_json(rows: pl.DataFrame) -> pl.Series:
    text = pl.struct(pl.all()).struct.json_encode()
    try:
        return rows.select(text).to_series()
    except pl.exceptions.PanicException:
        return rawfile.numbered(rows).select(text).to_series()
