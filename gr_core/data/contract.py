"""The data contract: raw rows in by declaration, contract rows out, nothing lost on the way.

In: a day's raw files of one feed. Out: a `Batch` of unique events with masks, times and side features, the rows
that break the contract with a reason each, and counts that add up. Which rows come out, and how, depends on what
they say and never on the order of rows or files.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import polars as pl
import pyarrow as pa

from gr_core.config import Config, FeedConfig
from gr_core.data import expressions
from gr_core.data.expressions import INSTANT, Wanted
from gr_core.data.figures import Tally, described
from gr_core.data.sides import join_tables, not_found
from gr_core.data.users import pseudonymised, raw_rows
from gr_core.data.users import stored_user as stored_user
from gr_core.errors import DataContractError
from gr_core.hashing import bucket_of
from gr_core.lake import quarantine, rawfile
from gr_core.lake.source import SourceFile, feed_schemas
from gr_core.lake.tombstones import NOBODY, Tombstones
from gr_core.refs import day_end_us
from gr_core.schema import action_time, event_schema

logger = logging.getLogger(__name__)

_MAX_DELAY_SECONDS = 10 * 365 * 86_400  # an outcome ten years later is a wrong unit
_REASON, _FILE, _ROW = "\x00reason", "\x00file", "\x00row"
_OUTSIDE, _UNREADABLE = "\x00outside", "\x00unreadable"
_COMMITTED = ("commit", "updated")  # columns that a row gets when it is committed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one feed's files of a day hold, before it meets the event table."""

    feed: str
    events: pl.DataFrame
    """Unique events: `schema.event_schema` without `commit` and `updated`, by (bucket, user_id, shown_at, event_id)."""
    files: pl.Series
    """URI of the file that each event came from (text)."""
    quarantine: pl.DataFrame
    """`lake.quarantine.SCHEMA`: reason, feed, file (URI), row (the raw row as JSON text)."""
    read: int
    """Rows in the files: events + duplicates + quarantined."""
    duplicates: int = 0
    """Rows that repeat an event_id of this batch."""
    forgotten: int = 0
    """Rows left out because their user asked to be forgotten; they stand nowhere else, not in quarantine either."""
    missing_side: dict[str, int] = field(default_factory=dict)
    """Side table -> events without a row in it."""
    outside_window: int = 0
    """(event, action)s whose time lies outside [shown_at, shown_at + window): the bit is not set."""
    bad_action_times: int = 0
    """(event, action)s set by the row with a time that cannot be read: the bit is unknown."""
    unknown_columns: dict[str, int] = field(default_factory=dict)
    """Raw column that the config neither reads nor declares -> files that have it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What data checks compare with other days (`data.checks`), the counts of rows apart."""

    @property
    def reasons(self) -> dict[str, int]:
        """Quarantined rows by reason."""
        counts = self.quarantine.group_by("reason").len().sort("reason")
        return {reason: int(number) for reason, number in counts.iter_rows()}

    def check(self) -> None:
        """Raise AssertionError when a row was lost (a fault of ours, never of the data)."""
        if self.read != self.events.height + self.duplicates + self.quarantine.height + self.forgotten:
            raise AssertionError(
                f"rows lost: read {self.read}, events {self.events.height}, duplicates {self.duplicates}, "
                f"quarantined {self.quarantine.height}, forgotten {self.forgotten}"
            )


def polars_schema(config: Config) -> pl.Schema:
    """Return the event table's columns as Polars types, `commit`, `updated` and `bucket` included."""
    arrow = event_schema(config.source.action_names, config.source.side_features)
    empty = pl.from_arrow(pa.Table.from_batches([], schema=arrow))
    return empty.schema if isinstance(empty, pl.DataFrame) else pl.Schema()


def read_day(
    config: Config,
    day: date,
    files: list[SourceFile],
    *,
    feed: FeedConfig,
    tombstones: Tombstones = NOBODY,
) -> Batch:
    """Read one feed's files of a day as contract rows.

    Args:
        config: The run's config.
        day: The feed day D; rows shown later than its end by more than the allowed skew are quarantined.
        files: Files as listed; those of other feeds and tables are passed over.
        feed: The feed, role events or bootstrap.
        tombstones: Users whose rows are left out, counted.

    Returns:
        The batch; no file or no row gives an empty one.

    Raises:
        ConfigError: An expression is wrong.
        DataContractError: A file cannot be read, or lacks or mistypes a column; or there are rows, and not one of
            them keeps the contract.
    """
    own = [file for file in files if file.feed == feed.name]
    values, times = expressions.feed_values(config.source, feed), expressions.feed_times(feed)
    parts = [_empty(config)]
    for place, (file, schema) in enumerate(zip(own, feed_schemas(feed, own), strict=True)):
        for key, time in times.values():
            expressions.check_time(time, key, schema, file.uri, feed)
        for value in values:
            expressions.check_value(value, schema, file.uri, feed)
        raw = _read(feed, file, schema, values)
        parts.append(_contract(config, day, feed, raw, schema).with_columns(pl.lit(place, pl.Int32).alias(_FILE)))
    rows = pl.concat(parts)
    hidden = tombstones.hides(rows["user_id"])
    rows = rows.filter(~hidden)
    rows = join_tables(config, rows, _REASON)
    good = rows.filter(pl.col(_REASON).is_null())
    if good.is_empty() and not rows.is_empty():
        raise _nothing_usable(feed, day, own, rows)
    tally = Tally(config)
    tally.add(good)
    events = _unique(config, good)
    names = pl.Series("file", [file.uri for file in own], dtype=pl.String)
    columns = [name for name in polars_schema(config).names() if name not in _COMMITTED]
    batch = Batch(
        feed=feed.name,
        events=events.select(columns),
        files=names.gather(events[_FILE]),
        quarantine=_quarantine(config, feed, own, rows.filter(pl.col(_REASON).is_not_null())),
        read=rows.height + int(hidden.sum()),
        forgotten=int(hidden.sum()),
        duplicates=good.height - events.height,
        missing_side={table.name: int(events[not_found(table)].sum()) for table in config.source.tables},
        outside_window=int(events[_OUTSIDE].sum()),
        bad_action_times=int(events[_UNREADABLE].sum()),
        **described(config, feed, own, tally),
    )
    batch.check()
    logger.debug(
        "feed %s of %s: read %d (files %d), events %d, duplicates %d, quarantined %d",
        *(feed.name, day, batch.read, len(own), events.height, batch.duplicates, batch.quarantine.height),
    )
    return batch


def _nothing_usable(feed: FeedConfig, day: date, files: list[SourceFile], rows: pl.DataFrame) -> DataContractError:
    """Say why a day cannot be what its declarations say: committed, it would be an empty day for good."""
    counts = rows.group_by(_REASON).len().sort("len", _REASON, descending=[True, False]).iter_rows()
    first = files[rows[_FILE][0]].uri
    return DataContractError(
        f"feed {feed.name} of {day}: none of the {rows.height} rows read is usable "
        f"({', '.join(f'{reason} {count}' for reason, count in counts)}), first file {first}; mend the files, or what "
        f"source.feeds[{feed.name}] declares of them (shown_at's unit, format and zone, types, ids, side tables)",
        where=first,
    )


def _empty(config: Config) -> pl.DataFrame:
    """Return the working frame without rows: contract columns, then the columns that only this module sees."""
    schema = polars_schema(config)
    working = {_REASON: pl.String(), _ROW: pl.UInt32(), _OUTSIDE: pl.Int32(), _UNREADABLE: pl.Int32()}
    kept = {name: dtype for name, dtype in schema.items() if name not in (*_COMMITTED, "bucket")}
    return pl.DataFrame(schema={**kept, **working, _FILE: pl.Int32()})


def _read(feed: FeedConfig, file: SourceFile, schema: dict[str, pl.DataType], values: list[Wanted]) -> pl.DataFrame:
    """Read the declared columns of a file; declared ones that it lacks are null."""
    needed = expressions.raw_columns(values, [time for _, time in expressions.feed_times(feed).values()])
    present = rawfile.read_schema(file.uri, feed.format, feed.types, f"source.feeds[{feed.name}]")
    frame = rawfile.read_frame(file.uri, feed.format, feed.types, [c for c in needed if c in present], schema)
    absent = [pl.lit(None, schema[name]).alias(name) for name in needed if name not in present]
    return frame.with_columns(*absent).with_row_index(_ROW)


def _contract(
    config: Config, day: date, feed: FeedConfig, raw: pl.DataFrame, schema: dict[str, pl.DataType]
) -> pl.DataFrame:
    """Turn one file's raw rows into contract rows with a reason where they break the contract."""
    source = config.source
    values = {value.name: value for value in expressions.feed_values(source, feed)}
    times = {name: time for name, (_, time) in expressions.feed_times(feed).items()}
    shown = times["shown_at"]
    delay = values["delay"].expr if "delay" in values else pl.lit(expressions.delay_of(source, feed))
    names = ("user_id", "item_id", "request_id")
    flags = [f"action:{name}" for name in feed.actions]
    ids = [name for name in values if name.startswith("id:")]
    frame = raw.with_columns(
        *(expressions.text(values[name]) if name in values else pl.lit(None, pl.String).alias(name) for name in names),
        *(values[name].expr.cast(pl.Boolean).alias(name) for name in flags),
        *(expressions.text(value) for value in values.values() if value.name.startswith("side:")),
        *(expressions.instant(time, schema[time.column]).alias(name) for name, time in times.items()),
        pl.concat_str([expressions.text(values[name]) for name in ids], separator=":").alias("event_id"),
        pl.col(shown.column).is_null().alias("no_time"),
        delay.cast(pl.Float64).alias("delay"),
        # the raw times of actions, to tell an absent time from an unreadable one
        *(pl.col(t.column).is_not_null().alias(f"has:{n}") for n, t in times.items() if n != "shown_at"),
    )
    frame = pseudonymised(config, feed, frame)
    frame = _judged(frame, day_end_us(day, config.lake.zone) + source.max_clock_skew_seconds * 1_000_000)
    frame = _action_times(config, feed, frame)
    delay_us = (pl.col("delay") * 1e6).round().cast(pl.Int64, strict=False)
    present = [f"side:{name}" for name in feed.side]
    frame = frame.with_columns(
        (pl.col("shown_at") + pl.duration(microseconds=delay_us)).alias("visible_at"),
        *(
            (pl.col(f"side:{name}") if f"side:{name}" in present else pl.lit(None, pl.String)).alias(name)
            for name in source.side_features
        ),
    )
    target = _empty(config).schema
    return frame.select(pl.col(name).cast(dtype) for name, dtype in target.items() if name != _FILE)


def _judged(frame: pl.DataFrame, latest_us: int) -> pl.DataFrame:
    """Add the reason why a row breaks the contract (null where it does not); the first that holds counts."""
    problem = pl.col(rawfile.PROBLEM)
    time, delay = pl.col("shown_at"), pl.col("delay")
    usable = delay.is_not_null() & delay.is_between(0, _MAX_DELAY_SECONDS)
    reason = (
        pl.when(problem == "bad_row")
        .then(pl.lit("bad_row"))
        .when(pl.col("user_id").is_null() & problem.is_null())
        .then(pl.lit("null_user"))
        .when(pl.col("item_id").is_null() & problem.is_null())
        .then(pl.lit("null_item"))
        .when(pl.col("event_id").is_null() & ~pl.col("no_time") & problem.is_null())
        .then(pl.lit("null_id"))
        .when(pl.col("no_time") & problem.is_null())
        .then(pl.lit("null_time"))
        .when(time.is_null())
        .then(pl.lit("bad_time"))
        .when(problem.is_not_null())
        .then(pl.lit("bad_value"))
        .when(time.dt.timestamp("us") > latest_us)
        .then(pl.lit("clock_skew"))
        .when(~usable)
        .then(pl.lit("bad_delay"))
    )
    return frame.with_columns(reason.alias(_REASON))


def _action_times(config: Config, feed: FeedConfig, frame: pl.DataFrame) -> pl.DataFrame:
    """Build masks and action times: a time outside the window clears the bit, an unreadable one makes it unknown."""
    actions, known, outside, unreadable = (pl.lit(0, pl.Int32) for _ in range(4))
    times = []
    for bit, action in enumerate(config.source.actions):
        if action.name not in feed.actions:
            times.append(pl.lit(None, INSTANT).alias(action_time(action.name)))
            continue
        flag = pl.col(f"action:{action.name}")
        is_set, is_known = flag.fill_null(value=False), flag.is_not_null()
        at = pl.lit(None, INSTANT)
        if action.name in feed.action_times:
            at = pl.col(f"time:{action.name}")
            lost = is_set & pl.col(f"has:time:{action.name}") & at.is_null()
            is_set, is_known = is_set & ~lost, is_known & ~lost
            unreadable = unreadable + lost.cast(pl.Int32)
            if action.attribution_window_seconds > 0:
                end = pl.col("shown_at") + pl.duration(seconds=action.attribution_window_seconds)
                late = (is_set & ((at < pl.col("shown_at")) | (at >= end))).fill_null(value=False)
                is_set = is_set & ~late
                outside = outside + late.cast(pl.Int32)
            at = pl.when(is_set).then(at)
        times.append(at.alias(action_time(action.name)))
        actions = actions + is_set.cast(pl.Int32) * (1 << bit)
        known = known + is_known.cast(pl.Int32) * (1 << bit)
    return frame.with_columns(
        actions.alias("actions"),
        known.alias("known"),
        *times,
        outside.alias(_OUTSIDE),
        unreadable.alias(_UNREADABLE),
    )


def _unique(config: Config, rows: pl.DataFrame) -> pl.DataFrame:
    """Keep one row of each event_id: the one that knows most, then with most actions, then by all it says."""
    repeated = pl.col("event_id").is_duplicated()
    content = [name for name in rows.columns if name not in (_REASON, _FILE, _ROW)]
    knows, does = (pl.col(name).bitwise_count_ones() for name in ("known", "actions"))
    # the file's place follows its name, so even equal rows are told apart without regard to listing order
    chosen = rows.filter(repeated).sort(
        pl.col("event_id"), knows, does, *content, _FILE, descending=[False, True, True, *[False] * (len(content) + 1)]
    )
    events = pl.concat([rows.filter(~repeated), chosen.unique("event_id", keep="first", maintain_order=True)])
    users = events["user_id"].unique()
    buckets = pl.DataFrame(
        {"user_id": users, "bucket": [bucket_of(user, config.lake.num_buckets) for user in users]},
        schema={"user_id": pl.String, "bucket": pl.Int32},
    )
    events = events.join(buckets, on="user_id", how="left")
    return events.sort("bucket", "user_id", "shown_at", "event_id")


def _quarantine(config: Config, feed: FeedConfig, files: list[SourceFile], rows: pl.DataFrame) -> pl.DataFrame:
    parts = [quarantine.SCHEMA.to_frame()]
    for place in rows[_FILE].unique().sort():
        uri = files[place].uri
        bad = rows.filter(pl.col(_FILE) == place)
        texts = raw_rows(config, feed, uri, bad[_ROW].to_list())
        parts.append(
            pl.DataFrame(
                {"reason": bad[_REASON], "feed": feed.name, "file": uri, "row": texts}, schema=quarantine.SCHEMA
            )
        )
    return pl.concat(parts).sort("reason", "feed", "file", "row")
