"""The data contract: raw rows in by declaration, contract rows out, nothing lost on the way.

In: a day's raw files of one feed. Out: a `Batch` of unique events with masks, times and side features, the rows
that break the contract with a reason each, and counts that add up. Which rows come out, and how, depends on what
they say and never on the order of rows or files.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gr_core.config import Config, FeedConfig
from gr_core.data import expressions
from gr_core.data.batch import (
    COMMITTED,
    EVENT_ORDER,
    FILE,
    OUTSIDE,
    UNREADABLE,
    Batch,
    BucketMap,
    SpilledBatch,
    batch_columns,
    marked,
    newest_us,
    polars_schema,
    tally,
    unique,
    working_schema,
)
from gr_core.data.expressions import INSTANT
from gr_core.data.figures import NullCounts, described
from gr_core.data.prefetch import Prefetched
from gr_core.data.rawrows import REASON, applied, nothing_usable, read_columns
from gr_core.data.sides import SideCache, join_tables
from gr_core.data.users import pseudonymised, raw_rows
from gr_core.hashing import fingerprint
from gr_core.lake import quarantine, rawfile, store
from gr_core.lake.shelf import Shelf
from gr_core.lake.source import SourceFile, completed, input_identity, own_schemas
from gr_core.lake.tombstones import NOBODY, Tombstones
from gr_core.refs import day_end_us
from gr_core.schema import action_time

logger = logging.getLogger(__name__)

_MAX_DELAY_SECONDS = 10 * 365 * 86_400  # an outcome ten years later is a wrong unit
ROW = "\x00row"
_SLICE_BYTES = 64 * 2**20  # a parquet file above this is read in slices
_SLICE_ROWS = 2**20
_GATHERED_ROWS = 2**19  # rows of small files that meet the contract together


def read_day(
    config: Config,
    day: date,
    files: list[SourceFile],
    *,
    feed: FeedConfig,
    tombstones: Tombstones = NOBODY,
    restated: Sequence[tuple[date, list[SourceFile]]] = (),
) -> Batch | SpilledBatch:
    """Read one feed's files of a day as contract rows, a file (or a slice of a large one) at a time.

    Args:
        config: The run's config.
        day: The feed day D; rows shown later than its end by more than the allowed skew are quarantined.
        files: Files as listed; those of other feeds and tables are not read, but are part of the day's identity.
        feed: The feed, role events or bootstrap.
        tombstones: Users whose rows are left out, counted.
        restated: Earlier feed days that are read again, with their files; each row keeps to its own day's end.

    Returns:
        The batch; no file or no row gives an empty one. Of many rows it lies on local disk.

    Raises:
        ConfigError: An expression is wrong.
        DataContractError: A file cannot be read, or lacks or mistypes a column; or there are rows, and not one of
            them keeps the contract.
    """
    intake = _Intake(config, feed, tombstones)
    for delivered, listed in [*sorted(restated), (day, files)]:
        intake.take(delivered, listed)
    batch = intake.batch()
    logger.debug(
        "feed %s of %s: read %d (files %d), quarantined %d",
        *(feed.name, day, batch.read, len(batch.uris), batch.quarantine.height),
    )
    return batch


def identity(files: list[SourceFile]) -> str:
    """Return the digest of what a feed day was read from, to compare a later delivery with."""
    return fingerprint(input_identity(files))


class _Intake:
    """Takes in files one by one: rows that keep the contract go on a shelf, of the others their places are kept."""

    def __init__(self, config: Config, feed: FeedConfig, tombstones: Tombstones) -> None:
        self._config, self._feed, self._tombstones = config, feed, tombstones
        self._columns = expressions.feed_columns(config.source, feed)
        self._buckets = BucketMap(config.lake.num_buckets)
        self._shelf = Shelf(working_schema(config))
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._bad: list[pl.DataFrame] = []
        self._tables = SideCache()
        self._nulls = NullCounts(config)
        self._files: list[SourceFile] = []
        self._schemas: list[dict[str, pl.DataType]] = []
        self._file_days: list[int] = []
        self._inputs: dict[str, str] = {}
        self._newest = 0
        self._read = 0
        self._before = 0  # rows read before the newest day's
        self._forgotten = 0
        self._forgotten_ids = [pl.Series("event_id", dtype=pl.String)]

    def take(self, day: date, listed: list[SourceFile]) -> None:
        """Read the feed's files of one day; DataContractError where they hold rows and none that is usable."""
        good, bad, before = self._shelf.rows, len(self._bad), self._read
        with Prefetched(self._contracted(day, listed), depth=1) as frames:
            for frame in frames:
                self._add(frame)
        if self._shelf.rows == good and len(self._bad) > bad:
            rows = pl.concat(self._bad[bad:])
            raise nothing_usable(self._feed, day, rows[REASON], self._files[rows[FILE][0]].uri)
        self._inputs[day.isoformat()] = identity(listed)
        self._before = before

    def _contracted(self, day: date, listed: list[SourceFile]) -> Iterator[pl.DataFrame]:
        """Read the feed's files of one day as rows of the contract with REASON, ROW and FILE."""
        feed, check = self._feed, expressions.FeedCheck(self._config.source, self._feed)
        files = [file for file in listed if file.feed == feed.name]
        own = own_schemas(feed, files)
        waiting: list[pl.DataFrame] = []  # of small files with equal columns: the contract costs more a call than a row
        last: dict[str, pl.DataType] = {}
        rows = 0
        for file, present, schema in zip(files, own, completed(feed, own), strict=True):
            check(schema, file.uri)
            for raw in _slices(feed, file, present, schema, self._columns):
                if waiting and (schema != last or rows + raw.height > _GATHERED_ROWS):
                    yield contract_rows(self._config, day, feed, pl.concat(waiting), last)
                    waiting, rows = [], 0
                waiting.append(raw.with_columns(pl.lit(len(self._files), pl.Int32).alias(FILE)))
                last, rows = schema, rows + raw.height
            self._files.append(file)
            self._schemas.append(schema)
            self._file_days.append(len(self._inputs))
        if waiting:
            yield contract_rows(self._config, day, feed, pl.concat(waiting), last)

    def _add(self, rows: pl.DataFrame) -> None:
        self._read += rows.height
        if self._tombstones:
            hidden = self._tombstones.hides(rows["user_id"])
            self._forgotten += int(hidden.sum())
            if self._config.source.fed_mask:
                self._forgotten_ids.append(rows.filter(hidden)["event_id"])
            rows = rows.filter(~hidden)
        rows = join_tables(self._config, rows, REASON, self._tables)
        if rows[REASON].null_count() < rows.height:
            self._bad.append(rows.filter(pl.col(REASON).is_not_null()).select(REASON, FILE, ROW))
            rows = rows.filter(pl.col(REASON).is_null())
        if rows.is_empty():
            return
        rows = rows.with_columns(self._buckets.of(rows["user_id"])).select(self._shelf.schema.names())
        self._nulls.add(rows)
        self._hashes.append(marked(rows))
        self._newest = max(newest_us(rows) or 0, self._newest)
        self._shelf.add(rows)

    def batch(self) -> Batch | SpilledBatch:
        """Return what was taken in."""
        config, shelf = self._config, self._shelf
        bad = pl.concat([_places(), *self._bad])
        uris = tuple(file.uri for file in self._files)
        shared: dict[str, Any] = {
            "feed": self._feed.name,
            "quarantine": _quarantine(config, self._feed, self._files, bad),
            "read": self._read,
            "restated": self._before,
            "forgotten": self._forgotten,
            "forgotten_ids": pl.concat(self._forgotten_ids),
            "inputs": self._inputs,
            "newest": self._newest or None,
            "uris": uris,
            "file_days": tuple(self._file_days),
            **described(config, self._feed, self._files, self._schemas, self._nulls),
        }
        if shelf.spilled:
            hashes = np.concatenate(self._hashes)
            hashes.sort()
            return SpilledBatch(config=config, shelf=shelf, users=self._buckets, hashes=hashes, **shared)
        events = unique(shelf.whole()).sort("bucket", *EVENT_ORDER)
        counts = dataclasses.asdict(tally(config, shelf.rows, events))
        files = pl.Series("file", uris, dtype=pl.String).gather(events[FILE])
        return Batch(events=events.select(batch_columns(config)), files=files, **shared, **counts).check()


def _places() -> pl.DataFrame:
    return pl.DataFrame(schema={REASON: pl.String(), FILE: pl.Int32(), ROW: pl.UInt32()})


def _slices(
    feed: FeedConfig,
    file: SourceFile,
    present: dict[str, pl.DataType],
    schema: dict[str, pl.DataType],
    names: list[str],
) -> Iterator[pl.DataFrame]:
    """Read columns of a file with ROW, a large parquet file in slices."""
    parts: list[tuple[int, int] | None] = [None]
    if feed.format == "parquet" and file.size > _SLICE_BYTES and store.is_local(file.uri):
        rows, _ = rawfile.count_rows(file.uri, feed.format, file.size)
        parts = [(start, _SLICE_ROWS) for start in range(0, rows, _SLICE_ROWS)] or [None]
    for part in parts:
        frame = read_columns(feed, file, names, present, schema, part=part)
        yield frame.with_row_index(ROW, offset=part[0] if part else 0)


def contract_rows(
    config: Config, day: date, feed: FeedConfig, raw: pl.DataFrame, schema: dict[str, pl.DataType]
) -> pl.DataFrame:
    """Turn raw rows of equal columns into contract rows with a reason (column REASON) where they break the contract.

    A column FILE (the file's place in its list) is kept.
    """
    source = config.source
    values = {value.name: value for value in expressions.feed_values(source, feed)}
    times = {name: time for name, (_, time) in expressions.feed_times(feed).items()}
    shown = times["shown_at"]
    delay = values["delay"].expr if "delay" in values else pl.lit(expressions.delay_of(source, feed))
    names = ("user_id", "item_id", "request_id")
    flags = [f"action:{name}" for name in feed.actions]
    ids = [name for name in values if name.startswith("id:")]
    with applied(values.values(), raw):
        frame = raw.with_columns(
            *(
                expressions.text(values[name]) if name in values else pl.lit(None, pl.String).alias(name)
                for name in names
            ),
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
    kept = {name: dtype for name, dtype in polars_schema(config).items() if name not in (*COMMITTED, "bucket")}
    target = {**kept, REASON: pl.String(), ROW: pl.UInt32(), OUTSIDE: pl.Int32(), UNREADABLE: pl.Int32()}
    target |= {FILE: pl.Int32()} if FILE in raw.columns else {}
    return frame.select(pl.col(name).cast(dtype) for name, dtype in target.items())


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
    return frame.with_columns(reason.alias(REASON))


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
        outside.alias(OUTSIDE),
        unreadable.alias(UNREADABLE),
    )


def _quarantine(config: Config, feed: FeedConfig, files: list[SourceFile], rows: pl.DataFrame) -> pl.DataFrame:
    parts = [quarantine.SCHEMA.to_frame()]
    for (place,), bad in rows.sort(FILE, maintain_order=True).partition_by(FILE, as_dict=True).items():
        uri = files[place].uri
        texts = raw_rows(config, feed, uri, bad[ROW].to_list())
        parts.append(
            pl.DataFrame(
                {"reason": bad[REASON], "feed": feed.name, "file": uri, "row": texts}, schema=quarantine.SCHEMA
            )
        )
    return pl.concat(parts).sort("reason", "feed", "file", "row")
