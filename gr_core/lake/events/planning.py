"""What one ingestion does to the event table, worked out a bucket at a time.

In: a batch and the table as it is. Out: data files that nobody sees yet (`Writing`), and a `Plan` with the counts.
A bucket's part of the batch meets the table's rows in its reach and becomes inserts, updates and surplus over the
daily cap; a restated day's rows that were not delivered again leave. Rows of the actions feeds meet the new events and
the table's. Updates and removals are kept by file, and each file they touch is written anew once, so memory is bounded
by a bucket and a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import polars as pl

from gr_core.config import Config
from gr_core.data.batch import Batch, Part, SpilledBatch, Tallied, polars_schema
from gr_core.data.joining import Settled
from gr_core.lake import merging, quarantine
from gr_core.lake.events import layout, reach
from gr_core.lake.events.acting import Acting
from gr_core.lake.events.layout import KEY, URI
from gr_core.lake.events.reach import TO
from gr_core.lake.events.writing import Writing, files_of_clusters
from gr_core.lake.shelf import Shelf
from gr_core.refs import Bound, Rows
from gr_core.schema import action_time

_HIT = "\x00hit"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The commit numbers that an ingestion gives its rows."""

    own: int
    """Of the night's own feed day, and of the commit; the highest."""
    days: tuple[int, ...] = ()
    """One for each of the batch's `inputs`; a restated day has its own, so that it can be restated again."""
    before: dict[str, list[int]] = field(default_factory=dict)
    """Restated day -> numbers under which its rows came before."""
    replaces: bool = False
    """Whether rows of restated days that are not delivered again leave the table."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an ingestion does, its rows apart."""

    rows: Rows
    quarantine: pl.DataFrame
    updated: int
    labels_changed: int
    replaced: int
    """Rows of restated days that leave the table."""
    counts: Tallied
    settled: Settled | None
    """What became of the actions feeds' rows; None where there are no such feeds."""


@dataclass
class _Sums:
    committed: int = 0
    repeats: int = 0
    updated: int = 0
    labels_changed: int = 0
    counts: Tallied = field(default_factory=Tallied)
    surplus: list[pl.DataFrame] = field(default_factory=list)


class Planner:
    """Works one ingestion out.

    Args:
        config: The run's config.
        files: The table's files (`layout.FILES`).
        batch: What is ingested.
        numbers: The commit numbers it gives.
        parent: Watermark of the night's parent; changed labels inside it are counted.
        writing: Takes the data files.
        acting: The actions feeds' rows; None where there are no such feeds.
    """

    def __init__(
        self,
        config: Config,
        files: pl.DataFrame,
        batch: Batch | SpilledBatch,
        *,
        numbers: Numbers,
        parent: Bound | None,
        writing: Writing,
        acting: Acting | None = None,
    ) -> None:
        self._config, self._files, self._batch, self._acting = config, files, batch, acting
        self._numbers, self._parent, self._writing = numbers, parent, writing
        self._newest = batch.newest_us() or 0
        self._row = pl.Schema({**polars_schema(config), URI: pl.String()})
        self._changes = Shelf(self._row)
        self._gone = Shelf(
            pl.Schema({**{name: self._row[name] for name in KEY}, URI: pl.String(), "bucket": pl.Int32()})
        )
        self._asked = Shelf(pl.Schema({**{name: self._row[name] for name in KEY}, "bucket": pl.Int32()}))
        self._sums = _Sums()

    def plan(self) -> Plan:
        """Write the data files and return the counts."""
        near = self._near()
        if self._numbers.replaces and self._numbers.before:
            self._find_gone(near)
        for part in _ahead(self._batch.parts()):
            self._meet(part, self._old(part, near))
        if self._acting is not None:
            for bucket in self._files["bucket"].unique().sort():
                self._act(self._acting, bucket)
        for bucket in sorted(self._changes.buckets | self._gone.buckets):
            self._rewrite(bucket)
        batch, sums = self._batch, self._sums
        quarantined = pl.concat([batch.quarantine, *sums.surplus]).sort("reason", "feed", "file", "row")
        counts = batch.tallied.plus(sums.counts)
        rows = Rows(
            read=batch.read,
            committed=sums.committed,
            duplicates=counts.duplicates + sums.repeats,
            quarantined=quarantined.height,
            forgotten=batch.forgotten,
        )
        rows.check()
        return Plan(
            rows=rows,
            quarantine=quarantined,
            updated=sums.updated,
            labels_changed=sums.labels_changed,
            replaced=self._gone.rows,
            counts=counts,
            settled=self._acting.settle(self._numbers.own, batch.forgotten_ids) if self._acting is not None else None,
        )

    def _near(self) -> Shelf:
        """Read the table's recent rows that the batch may repeat under any user, by the bucket they are asked for."""
        found = Shelf(pl.Schema({**self._row, TO: pl.Int32()}), key=TO)
        if self._files.height and self._batch.newest_us() is not None:
            for rows in reach.under_any_user(self._files, self._config, self._batch.keys(), self._newest):
                found.add(rows.select(found.schema.names()))
        return found

    def _old(self, part: Part, near: Shelf) -> pl.DataFrame:
        """Return the table's rows that a part's events repeat, one an event_id."""
        events = part.events
        old = near.take(part.bucket).drop(TO)
        late = events.filter(events["shown_at"].to_physical() < reach.recent_from(self._newest))
        own = layout.in_buckets(self._files, [part.bucket])
        if late.height and own.height:
            old = pl.concat([old, reach.under_own_user(own, self._config, late).select(old.columns)])
        return reach.matched(self._config, events, old, self._newest)

    def _find_gone(self, near: Shelf) -> None:
        """Find the rows of restated days that the batch does not repeat."""
        seen = Shelf(pl.Schema({**{name: self._row[name] for name in KEY}, "bucket": pl.Int32()}))
        for part in self._batch.parts():
            seen.add(self._old(part, near).select(seen.schema.names()))
        for bucket in self._files["bucket"].unique().sort():
            own = layout.in_buckets(self._files, [bucket])
            before = reach.of_commits(
                own, self._config, sorted({n for day in self._numbers.before.values() for n in day})
            )
            left = before.join(seen.take(bucket), on=list(KEY), how="anti", maintain_order="left")
            self._gone.add(
                left.with_columns(pl.lit(bucket, pl.Int32).alias("bucket")).select(self._gone.schema.names())
            )

    def _meet(self, part: Part, old: pl.DataFrame) -> None:
        """Turn a part into inserts, updates and surplus."""
        config, events, sums = self._config, part.events, self._sums
        inserts, files, found = events, part.files, part.clusters
        repeats = events["event_id"].is_in(old["event_id"].implode()) if old.height else pl.Series([False])
        told = events.filter(repeats) if old.height else events.clear()
        if old.height:
            inserts, files, found = events.filter(~repeats), files.filter(~repeats), found.filter(~repeats)
        own = layout.in_buckets(self._files, [part.bucket])
        counts = reach.day_counts(own, config, inserts, self._newest, self._gone.take(part.bucket))
        fits = merging.capped(config, inserts, counts)
        if not fits.all():
            sums.surplus.append(self._surplus(inserts.filter(~fits), files.filter(~fits)))
            inserts, files, found = inserts.filter(fits), files.filter(fits), found.filter(fits)
        if self._acting is not None:
            met = self._acting.meet(inserts, old, told)
            inserts, told = met.inserts, met.told
            self._asked.add(old.select(self._asked.schema.names()))
        self._teach(old, told)
        self._insert(part.bucket, inserts, files, found)
        sums.committed += inserts.height
        sums.repeats += int(repeats.sum())
        sums.counts = sums.counts.plus(part.counts)

    def _act(self, acting: Acting, bucket: int) -> None:
        """Let the rows of a bucket learn from action rows; those that the batch repeats have learnt already."""
        old = acting.candidates(layout.in_buckets(self._files, [bucket]))
        for seen in (self._asked, self._gone):
            old = old.join(seen.take(bucket).select(KEY), on=list(KEY), how="anti")
        old = old.sort("event_id", "shown_at", "commit").unique("event_id", keep="last", maintain_order=True)
        self._teach(old, acting.meet(old.clear(), old, old.clear()).told)

    def _teach(self, old: pl.DataFrame, told: pl.DataFrame) -> None:
        """Note what the table's rows are told."""
        learnt = merging.updates(self._config, old, told, self._parent)
        self._changes.add(learnt.rows.select(self._changes.schema.names()))
        self._sums.updated += learnt.rows.height
        self._sums.labels_changed += learnt.labels_changed

    def _surplus(self, rows: pl.DataFrame, files: pl.Series) -> pl.DataFrame:
        uris = pl.Series("file", self._batch.named_files(), dtype=pl.String)
        return pl.DataFrame(
            {
                "reason": pl.repeat("over_daily_cap", rows.height, eager=True, dtype=pl.String),
                "feed": pl.repeat(self._batch.feed, rows.height, eager=True, dtype=pl.String),
                "file": uris.gather(files),
                "row": rows.select(pl.struct(pl.all()).struct.json_encode()).to_series(),
            },
            schema=quarantine.SCHEMA,
        )

    def _insert(self, bucket: int, inserts: pl.DataFrame, files: pl.Series, found: pl.Series) -> None:
        """Write new events, with the number of the feed day that they came with."""
        number = pl.repeat(self._numbers.own, inserts.height, eager=True, dtype=pl.Int64)
        if len(self._numbers.days) > 1:
            by_file = pl.Series([self._numbers.days[day] for day in self._batch.file_days], dtype=pl.Int64)
            number = by_file.gather(files)
        rows = inserts.with_columns(number.alias("commit"), pl.lit(self._numbers.own, pl.Int64).alias("updated"))
        for cluster in files_of_clusters(rows, found):
            self._writing.add(bucket, cluster)

    def _rewrite(self, bucket: int) -> None:
        """Write the files of a bucket anew whose rows change or leave."""
        changes, gone = self._changes.take(bucket), self._gone.take(bucket)
        labels = ["actions", "known", *(action_time(name) for name in self._config.source.action_names)]
        own = layout.in_buckets(self._files, [bucket])
        for file in own.iter_rows(named=True):
            here = pl.col(URI) == file["uri"]
            new, left = changes.filter(here).select(*KEY, *labels), gone.filter(here).select(KEY)
            if new.is_empty() and left.is_empty():
                continue
            rows = layout.read_file(file["uri"])
            rows = rows.with_columns(
                pl.lit(None, self._row[name]).alias(name) for name in labels if name not in rows.columns
            ).join(left, on=list(KEY), how="anti", maintain_order="left")
            rows = self._changed(rows, new, labels)
            if rows.height:
                self._writing.add(bucket, rows)
            self._writing.remove(file["path"], bucket, file["size"])

    def _changed(self, rows: pl.DataFrame, new: pl.DataFrame, labels: list[str]) -> pl.DataFrame:
        if new.is_empty():
            return rows
        both = rows.join(
            new.with_columns(pl.lit(value=True).alias(_HIT)),
            on=list(KEY),
            how="left",
            suffix="_new",
            maintain_order="left",
        )
        hit = pl.col(_HIT).is_not_null()
        taken = [pl.when(hit).then(f"{name}_new").otherwise(name).alias(name) for name in labels]
        number = pl.when(hit).then(pl.lit(self._numbers.own, pl.Int64)).otherwise("updated").alias("updated")
        return both.with_columns(*taken, number).select(rows.columns)


def _ahead(parts: Iterator[Part]) -> Iterator[Part]:
    """Make the next part while the one before it is worked on; two are in memory at a time."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="daybreak-part") as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part
