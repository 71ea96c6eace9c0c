"""How rows of the actions feeds meet events: the join by key inside each action's window. Pure frames.

In: action rows (tonight's and those that waited) and events, of the batch or of the table. Out: the events with what
they learnt, what became of each row, and counts that add up. The earliest row of an (event, action) counts, whichever
night brings it, so any split of the rows over nights and files ends in the same bits and times.

An event of a source with actions feeds knows all their actions from its first commit on: an action that has no row by
the time it matures was not taken. What an impression's own row says of such an action counts where it says that it
was taken; its "not taken" says nothing, since the actions feed may know better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from gr_core.config import ActionConfig, Config
from gr_core.data import actions
from gr_core.data.actions import ActionBatch
from gr_core.lake import quarantine
from gr_core.refs import CARRIED, ActionRows, day_end_us, day_start_us
from gr_core.schema import action_time

# What became of a row, from least to most: of several answers (one a bucket) the greatest holds.
NO_EVENT, OUTSIDE_WINDOW, DUPLICATE, MERGED = range(4)

WAITING = pl.Schema({**actions.SCHEMA, "commit": pl.Int64()})
"""Rows that wait for their impression; commit: the number of the ingestion that read them."""

_CARRIED, _ROW, _EVENT = "\x00carried", "\x00row", "\x00event"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The action rows of one ingestion, each once."""

    rows: pl.DataFrame
    """`WAITING` (commit null: tonight's) and a boolean, whether the row waited: these first. Its place is its number."""
    repeats: int
    """Rows of tonight left out: same event, actions and time as another, or as one that waited."""
    repeats_waiting: int
    """The same of rows that waited."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What some events learnt from action rows."""

    events: pl.DataFrame
    """The events as they were given, with the merged actions, their known bits and their times."""
    fates: pl.Series
    """NO_EVENT, OUTSIDE_WINDOW, DUPLICATE or MERGED, one an asked row (Int8)."""


@dataclass(frozen=True, kw_only=True)
class Met:
    """What the events of one bucket learnt from action rows and from impressions that repeat."""

    inserts: pl.DataFrame
    """New events as they enter the table."""
    told: pl.DataFrame
    """event_id, actions, known and action times: what the table's rows are told; bits not known are not told."""
    fates: pl.Series
    """As in `Joined`."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What became of all action rows of one ingestion."""

    pending: pl.DataFrame
    """`WAITING`: rows that wait for their impression, those of before included."""
    quarantine: pl.DataFrame
    """`lake.quarantine.SCHEMA`: what the batch brought, and the reasons outside_window and no_impression."""
    counts: ActionRows


def ask(batch: ActionBatch, waiting: pl.DataFrame) -> Asked:
    """Put the rows that waited before tonight's, and keep one of those that say the same.

    Args:
        batch: Tonight's rows.
        waiting: `WAITING`: what the commit before left pending.
    """
    # of equal rows the first by name of feed and file stays, whatever order the files were listed in
    fresh = batch.rows.sort("feed", "file", maintain_order=True).with_columns(pl.lit(None, pl.Int64).alias("commit"))
    parts = ((waiting, True), (fresh, False))
    both = pl.concat([rows.select(*WAITING, pl.lit(waits).alias(_CARRIED)) for rows, waits in parts])
    rows = both.unique(["event_id", "actions", "acted_at"], keep="first", maintain_order=True)
    lost_waiting = waiting.height - int(rows[_CARRIED].sum())
    return Asked(rows=rows, repeats=both.height - rows.height - lost_waiting, repeats_waiting=lost_waiting)


def spans(config: Config, rows: pl.DataFrame) -> list[tuple[int, int]]:
    """Return the ranges of shown_at in which the table may hold events that rows are about.

    The rows of one lake day look back by the longest window among them, so a few late ones do not make the ingestion
    read all that lies between them and tonight.

    Args:
        config: The run's config.
        rows: With `actions` and `acted_at`.

    Returns:
        Half-open ranges [low, high) in microseconds since the epoch, one a lake day; they may overlap.
    """
    zone = config.lake.zone
    day = pl.col("acted_at").dt.convert_time_zone(zone).dt.date()
    longest = rows.select(day.alias("day"), _window(config).alias("window")).group_by("day").agg(pl.col("window").max())
    return [
        (day_start_us(day, zone) - window, day_end_us(day, zone)) for day, window in longest.sort("day").iter_rows()
    ]


def know_all(config: Config, events: pl.DataFrame) -> pl.DataFrame:
    """Return new events of the events feed as they enter the table: all actions of the actions feeds are known."""
    return events.with_columns((pl.col("known") | pl.lit(config.source.fed_mask, pl.Int32)).alias("known"))


def own_word(config: Config, old: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Return what repeated impressions tell the table, so that they never take back what an actions feed brought.

    Args:
        config: The run's config.
        old: Rows of the table (event_id, actions, action times), one an event_id.
        new: Repeats of them.

    Returns:
        `new`, in its order: of the actions feeds' actions only those that are set in the row are known; where the
        table has them too, with the earlier of the two times.
    """
    mask = config.source.fed_mask
    if mask == 0 or new.is_empty():
        return new
    fed = [(bit, name) for bit, name in enumerate(config.source.action_names) if mask & (1 << bit)]
    times = [action_time(name) for _, name in fed]
    before = old.select(
        "event_id", pl.col("actions").alias("\x00actions"), *(pl.col(t).alias(f"\x00{t}") for t in times)
    )
    pairs = new.join(before, on="event_id", how="left", maintain_order="left")
    set_before = pl.col("\x00actions").fill_null(0)
    kept = [
        pl.when((set_before & pl.col("actions") & (1 << bit)) != 0)
        .then(pl.min_horizontal(action_time(name), f"\x00{action_time(name)}"))
        .otherwise(action_time(name))
        .alias(action_time(name))
        for bit, name in fed
    ]
    silent = pl.lit(mask, pl.Int32) & (pl.col("actions") ^ pl.lit(-1, pl.Int32))
    known = (pl.col("known") & (silent ^ pl.lit(-1, pl.Int32))).alias("known")
    return pairs.with_columns(known, *kept).select(new.columns)


def join(config: Config, asked: Asked, events: pl.DataFrame) -> Joined:
    """Join action rows to events with the same id: shown_at <= acted_at < shown_at + the action's window.

    Args:
        config: The run's config.
        asked: The action rows.
        events: event_id, shown_at, actions, known and action times, in any order, with any other columns.

    Returns:
        The events in their order, and the rows' fates as far as these events decide them. A row of several actions
        is merged when one of them is.
    """
    state = events.select(
        "event_id", "shown_at", "actions", *(action_time(name) for name in config.source.action_names)
    ).with_row_index(_EVENT)
    pairs = (
        asked.rows.with_row_index(_ROW)
        .select(_ROW, "event_id", "acted_at", pl.col("actions").alias("\x00bits"))
        .join(state, on="event_id", how="inner")
        .sort(_EVENT, "acted_at", _ROW)
    )
    told = [_told(pairs, OUTSIDE_WINDOW)]
    learnt = events
    for bit, action in _taken(config, pairs["\x00bits"]):
        time = action_time(action.name)
        inside = pairs.filter((pl.col("\x00bits") & (1 << bit)) != 0).filter(_in_window(action))
        first = inside.unique(_EVENT, keep="first", maintain_order=True)
        is_set = (pl.col("actions") & (1 << bit)) != 0
        news = first.filter(~is_set | pl.col(time).is_null() | (pl.col("acted_at") < pl.col(time)))
        told += [_told(inside, DUPLICATE), _told(news, MERGED)]
        learnt = _taught(learnt, bit, time, news)
    greatest = pl.concat(told).group_by(_ROW).agg(pl.col("fate").max())
    fates = pl.zeros(asked.rows.height, pl.Int8, eager=True).scatter(greatest[_ROW], greatest["fate"])
    return Joined(events=learnt, fates=fates)


def meet(config: Config, asked: Asked, inserts: pl.DataFrame, old: pl.DataFrame, repeats: pl.DataFrame) -> Met:
    """Let the events of one bucket learn all that this ingestion says of them.

    Args:
        config: The run's config.
        asked: The action rows.
        inserts: New events, the daily cap behind them; of the events feed, so that their actions are all known.
        old: Rows of the table that are repeated or that action rows may be about, one an event_id.
        repeats: The impressions that repeat some of `old`, one an event_id.
    """
    times = [action_time(name) for name in config.source.action_names]
    fed = pl.lit(config.source.fed_mask, pl.Int32)
    own = own_word(config, old, repeats).select("event_id", "actions", "known", *times)
    pairs = old.select("event_id", "shown_at", "actions", "known", *times)
    pairs = pairs.join(own, on="event_id", how="left", suffix="_own", maintain_order="left")
    told, said = pl.col("known_own").fill_null(0), pl.col("actions_own").fill_null(0)
    state = pairs.with_columns(
        # of what no actions feed brings only the impressions speak, of the rest whoever saw it
        ((said & told) | (pl.col("actions") & fed)).alias("actions"),
        told.alias("known"),
        *(
            pl.when((told & (1 << bit)) != 0).then(f"{time}_own").otherwise(time).alias(time)
            for bit, time in enumerate(times)
        ),
    ).select("event_id", "shown_at", "actions", "known", *times)
    fresh = know_all(config, inserts)
    joined = join(config, asked, pl.concat([fresh.select(state.columns), state]))
    learnt = [name for name in state.columns if name not in ("event_id", "shown_at")]
    news = joined.events[inserts.height :].with_columns((pl.col("known") | (pl.col("actions") & fed)).alias("known"))
    return Met(
        inserts=fresh.with_columns(joined.events[: inserts.height].select(learnt)),
        told=news.drop("shown_at"),
        fates=joined.fates,
    )


def settle(
    config: Config,
    batch: ActionBatch,
    asked: Asked,
    fates: pl.Series,
    *,
    number: int,
    forgotten: pl.Series | None = None,
) -> Settled:
    """Say what becomes of every action row of an ingestion, once all events were asked.

    A row without an event is pending while acted_at + window + lateness is not before the night's cutoff: the same `<`
    that tells whether a label is due.

    Args:
        config: The run's config.
        batch: Tonight's rows.
        asked: What `ask` made of them and of those that waited.
        fates: One an asked row: the greatest of all buckets.
        number: The ingestion's commit number.
        forgotten: event_ids whose impression was left out because its user asked to be forgotten.

    Returns:
        Pending rows, quarantine and counts, which are checked.
    """
    wait = (_window(config) + config.source.lateness_seconds * 1_000_000).alias("\x00wait")
    until = pl.col("acted_at").dt.timestamp("us") + pl.col("\x00wait")
    erased = pl.col("event_id").is_in(forgotten.implode()) if forgotten is not None else pl.lit(value=False)
    fate = (
        pl.when(pl.lit(fates) == MERGED)
        .then(pl.lit("merged"))
        .when(pl.lit(fates) == DUPLICATE)
        .then(pl.lit("duplicates"))
        .when(pl.lit(fates) == OUTSIDE_WINDOW)
        .then(pl.lit("outside_window"))
        .when(erased)
        .then(pl.lit("forgotten"))
        .when(until < batch.cutoff_us)
        .then(pl.lit("no_impression"))
        .otherwise(pl.lit("pending"))
    )
    rows = asked.rows.with_columns(wait).with_columns(fate.alias("reason"))
    spoilt = rows.filter(pl.col("reason").is_in(["outside_window", "no_impression"]))
    content = pl.struct("event_id", "actions", "acted_at").struct.json_encode().alias("row")
    bad = pl.concat([batch.quarantine, spoilt.with_columns(content).select(quarantine.SCHEMA.names())])
    waits = rows.filter(pl.col("reason") == "pending").with_columns(pl.col("commit").fill_null(number))
    settled = Settled(
        pending=waits.select(WAITING.names()),
        quarantine=bad.sort("reason", "feed", "file", "row"),
        counts=_counts(batch, asked, rows),
    )
    settled.counts.check()
    return settled


def _counts(batch: ActionBatch, asked: Asked, rows: pl.DataFrame) -> ActionRows:
    group = pl.col("reason").replace({"outside_window": "quarantined", "no_impression": "quarantined"})
    found = {
        (bool(waited), str(what)): int(number)
        for waited, what, number in rows.group_by(_CARRIED, group).len().iter_rows()
    }
    waited = {what: found.get((True, what), 0) for what in CARRIED}
    waited["duplicates"] += asked.repeats_waiting
    return ActionRows(
        read=batch.read,
        merged=found.get((False, "merged"), 0),
        duplicates=found.get((False, "duplicates"), 0) + asked.repeats,
        pending=found.get((False, "pending"), 0),
        quarantined=found.get((False, "quarantined"), 0) + batch.quarantine.height,
        forgotten=found.get((False, "forgotten"), 0),
        pending_before=int(rows[_CARRIED].sum()) + asked.repeats_waiting,
        carried=waited,
    )


def _window(config: Config) -> pl.Expr:
    """Return the longest attribution window of a row's actions, microseconds."""
    windows = [
        pl.when((pl.col("actions") & (1 << bit)) != 0).then(pl.lit(action.attribution_window_seconds * 1_000_000))
        for bit, action in enumerate(config.source.actions)
    ]
    return pl.max_horizontal(windows).fill_null(0)


def _in_window(action: ActionConfig) -> pl.Expr:
    end = pl.col("shown_at") + pl.duration(seconds=action.attribution_window_seconds)
    return (pl.col("shown_at") <= pl.col("acted_at")) & (pl.col("acted_at") < end)


def _taken(config: Config, bits: pl.Series) -> Iterator[tuple[int, ActionConfig]]:
    """Yield bit and config of the actions that any of these rows are."""
    yield from ((bit, action) for bit, action in enumerate(config.source.actions) if ((bits & (1 << bit)) != 0).any())


def _told(pairs: pl.DataFrame, fate: int) -> pl.DataFrame:
    return pairs.select(_ROW, pl.lit(fate, pl.Int8).alias("fate"))


def _taught(events: pl.DataFrame, bit: int, time: str, news: pl.DataFrame) -> pl.DataFrame:
    """Set one action's bits and times in the events that have news of it."""
    if news.is_empty():
        return events
    at = pl.Series("at", [None], dtype=news["acted_at"].dtype).new_from_index(0, events.height)
    at = at.scatter(news[_EVENT], news["acted_at"])
    is_new = at.is_not_null()
    bits = is_new.cast(pl.Int32) * (1 << bit)
    return events.with_columns(
        (events["actions"] | bits).alias("actions"),
        (events["known"] | bits).alias("known"),
        events[time].zip_with(~is_new, at).alias(time),
    )
