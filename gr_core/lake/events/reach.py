"""Which rows of the event table a batch may meet: the events it repeats, and how full its users' days are.

A repeat has the same event_id, and its shown_at lies within `source.dedup_days` of the row's. Of rows shown lately
(counted back from the batch's newest) it is found under any user. A late row repeats an event of its own user only:
so a few late rows read their users' row groups around their own days, and nothing between these days and today.
Files and row groups are ruled out by their statistics; only ids and times are read of those that remain.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from gr_core.config import Config
from gr_core.data.batch import HASH_BITS, polars_schema
from gr_core.lake.clusters import DAY_US, RECENT_US
from gr_core.lake.events import layout
from gr_core.lake.events.layout import KEY, URI
from gr_core.lake.merging import lake_day
from gr_core.refs import day_end_us, day_start_us

Spans = list[tuple[int, int]]
"""Half-open ranges of shown_at, microseconds since the epoch, ascending and apart."""

TO = "\x00to"  # bucket of the batch whose event a row of the table may be
_HASH = "\x00hash"
_SHARE_ROWS = 2**21


def apart(spans: Iterable[tuple[int, int]]) -> Spans:
    """Merge ranges that meet."""
    merged: Spans = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def day_spans(config: Config, rows: pl.DataFrame, reach_us: int = 0) -> Spans:
    """Return the lake days of rows, each widened by so much on both sides."""
    zone = config.lake.zone
    days = rows.select(lake_day(zone)).to_series().unique()
    return apart((day_start_us(day, zone) - reach_us, day_end_us(day, zone) + reach_us) for day in days)


def overlapping(files: pl.DataFrame, spans: Spans) -> pl.DataFrame:
    """Keep the files that may hold a row shown in one of the ranges."""
    may = [layout.at_least("shown_at", _at(low)) & layout.at_most("shown_at", _at(high - 1)) for low, high in spans]
    return files.filter(pl.any_horizontal(may)) if may else files.clear()


def shown_in(spans: Spans) -> pl.Expr:
    """Return whether a row was shown in one of the ranges."""
    inside = [(pl.col("shown_at") >= _at(low)) & (pl.col("shown_at") < _at(high)) for low, high in spans]
    return pl.any_horizontal(inside) if inside else pl.lit(value=False)


def recent_from(newest_us: int) -> int:
    """Return from when on rows count as shown lately, beside the batch's newest."""
    return newest_us - RECENT_US


def under_any_user(files: pl.DataFrame, config: Config, keys: pl.DataFrame, newest_us: int) -> Iterable[pl.DataFrame]:
    """Read the recent rows that events of a batch may repeat, some buckets of the table at a time.

    Args:
        files: The table's (`layout.FILES`).
        config: The run's config.
        keys: `Delivered.keys`, each once.
        newest_us: The batch's newest shown_at.

    Yields:
        Whole rows with URI (of their file) and TO; of equal hashes, so ids remain to be compared.
    """
    dedup = config.source.dedup_days * DAY_US
    spans = [(recent_from(newest_us) - dedup, newest_us + dedup + 1)]
    wanted = keys.rename({"hash": _HASH, "bucket": TO}).lazy()
    mark = (pl.col("event_id").hash() // (1 << HASH_BITS)).alias(_HASH)
    for own in _shares(overlapping(files, spans)):
        rows = layout.scan(own, config, uris=True).filter(shown_in(spans))
        found = rows.select(*KEY, URI, mark).join(wanted, on=_HASH, how="inner").drop(_HASH)
        yield _whole(own, config, layout.collect(found, own, streaming=True))


def under_own_user(files: pl.DataFrame, config: Config, late: pl.DataFrame) -> pl.DataFrame:
    """Read the rows of a bucket that late events of the same users may repeat.

    Args:
        files: The bucket's.
        config: The run's config.
        late: event_id, user_id, shown_at.

    Returns:
        Whole rows with URI; times remain to be compared.
    """
    spans = day_spans(config, late, config.source.dedup_days * DAY_US)
    users = late["user_id"].unique()
    own = _of_users(overlapping(files, spans), users)
    rows = layout.scan(own, config, uris=True).filter(shown_in(spans), pl.col("user_id").is_in(users.implode()))
    found = rows.select(*KEY, "user_id", URI).join(
        late.lazy().select("event_id", "user_id"), on=["event_id", "user_id"], how="semi"
    )
    return _whole(own, config, layout.collect(found.drop("user_id"), own, streaming=True))


def with_ids(files: pl.DataFrame, config: Config, ids: pl.Series, spans: Spans) -> pl.DataFrame:
    """Read the rows of a bucket with some event_ids that were shown in some ranges: whole rows with URI."""
    own = overlapping(files, spans)
    rows = layout.scan(own, config, uris=True).filter(shown_in(spans))
    found = rows.select(*KEY, URI).join(pl.LazyFrame({"event_id": ids}), on="event_id", how="semi")
    return _whole(own, config, layout.collect(found, own, streaming=True))


def of_commits(files: pl.DataFrame, config: Config, numbers: list[int]) -> pl.DataFrame:
    """Read event_id, commit, user_id, shown_at and URI of a bucket's rows that some commits brought."""
    may = [layout.at_least("commit", number) & layout.at_most("commit", number) for number in numbers]
    own = files.filter(pl.any_horizontal(may)) if may else files.clear()
    rows = layout.scan(own, config, uris=True).filter(pl.col("commit").is_in(numbers))
    return layout.collect(rows.select(*KEY, "user_id", "shown_at", URI), own)


def day_counts(
    files: pl.DataFrame, config: Config, inserts: pl.DataFrame, newest_us: int, gone: pl.DataFrame
) -> pl.DataFrame:
    """Count a bucket's events of the users and lake days that new events fall on.

    Args:
        files: The bucket's.
        config: The run's config.
        inserts: New events of the bucket.
        newest_us: The batch's newest shown_at.
        gone: event_id and commit of rows that leave the table with this commit.

    Returns:
        user_id, day, count.
    """
    day = lake_day(config.lake.zone)
    if files.is_empty() or inserts.is_empty():
        return pl.DataFrame(schema={"user_id": pl.String(), "day": pl.Date(), "count": pl.UInt32()})
    pairs = inserts.select("user_id", day).unique().lazy()
    is_late = inserts["shown_at"].to_physical() < recent_from(newest_us)
    spans, late = day_spans(config, inserts.filter(~is_late)), inserts.filter(is_late)
    late_spans, users = day_spans(config, late), late["user_id"].unique()
    near, far = overlapping(files, spans), _of_users(overlapping(files, late_spans), users)
    own = pl.concat([near, far]).unique("uri", maintain_order=True)
    theirs = shown_in(late_spans) & pl.col("user_id").is_in(users.implode())
    rows = layout.scan(own, config).filter(shown_in(spans) | theirs if late_spans else shown_in(spans))
    if not gone.is_empty():
        rows = rows.join(gone.lazy().select(KEY), on=list(KEY), how="anti")
    counted = rows.select("user_id", day).join(pairs, on=["user_id", "day"], how="semi")
    return layout.collect(counted.group_by("user_id", "day").agg(pl.len().alias("count")), own, streaming=True)


def matched(config: Config, events: pl.DataFrame, old: pl.DataFrame, newest_us: int) -> pl.DataFrame:
    """Keep the rows of the table that events repeat, one an event_id: the newest shown.

    Args:
        config: The run's config.
        events: Unique events of a batch.
        old: Candidates, with an event's id or its hash.
        newest_us: The batch's newest shown_at.
    """
    if old.is_empty():
        return old
    new = events.select("event_id", pl.col("user_id").alias("\x00user"), pl.col("shown_at").alias("\x00shown"))
    pairs = old.unique(KEY, keep="any").join(new, on="event_id", how="inner")
    apart_us = (pl.col("shown_at") - pl.col("\x00shown")).dt.total_microseconds().abs()
    recent = pl.col("\x00shown") >= _at(recent_from(newest_us))
    pairs = pairs.filter(
        apart_us <= config.source.dedup_days * DAY_US, recent | (pl.col("user_id") == pl.col("\x00user"))
    )
    pairs = pairs.sort("event_id", "shown_at", "commit").unique("event_id", keep="last", maintain_order=True)
    return pairs.select(old.columns)


def _shares(files: pl.DataFrame) -> Iterable[pl.DataFrame]:
    """Split files by buckets into shares that are read at once: one bucket, or several of few rows."""
    sizes = files.group_by("bucket").agg(pl.col("rows").sum()).sort("bucket")
    shares = sizes.with_columns((pl.col("rows").cum_sum() // _SHARE_ROWS).alias("share"))
    for _, own in shares.group_by("share", maintain_order=True):
        yield layout.in_buckets(files, own["bucket"])


def _whole(files: pl.DataFrame, config: Config, found: pl.DataFrame) -> pl.DataFrame:
    """Read whole rows by (event_id, commit) from the files that they were found in."""
    if found.is_empty():
        types = pl.Schema({**polars_schema(config), URI: pl.String()})
        return found.clear().drop(URI).select(pl.exclude(types.names())).hstack(types.to_frame())
    own = files.filter(pl.col("uri").is_in(found[URI].unique().implode()))
    rows = layout.scan(own, config, uris=True)
    return layout.collect(rows.join(found.lazy().drop(URI).unique(), on=list(KEY), how="inner"), own)


def _of_users(files: pl.DataFrame, users: pl.Series) -> pl.DataFrame:
    if users.is_empty():
        return files.clear()
    low, high = users.min(), users.max()
    return files.filter(layout.at_least("user_id", low) & layout.at_most("user_id", high))  # type: ignore[arg-type]


def _at(us: int) -> pl.Expr:
    return pl.lit(us, pl.Int64).cast(layout.TIME)
