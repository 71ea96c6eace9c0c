"""What one feed's files of a day hold, before it meets the event table: unique events by bucket, and counts.

A day of usual size lies in memory as one frame (`Batch`); of a large one only a bucket at a time does
(`SpilledBatch`). Both hand over the same events in the same order, whatever the order of files and rows.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from gr_core.config import Config
from gr_core.data.sides import not_found
from gr_core.hashing import buckets_of
from gr_core.lake.clusters import clusters_of
from gr_core.lake.shelf import Shelf
from gr_core.schema import event_schema

FILE = "\x00file"  # place of the row's file among those read
OUTSIDE, UNREADABLE = "\x00outside", "\x00unreadable"  # (event, action)s of the row, see Tallied
COMMITTED = ("commit", "updated")  # columns that a row gets when it is committed
EVENT_ORDER = ("user_id", "shown_at", "event_id")
_HASH, _CLUSTER = "\x00hash", "\x00cluster"
_KEY_BITS = 63  # of an int64 that orders rows by user and time


@dataclass(frozen=True, kw_only=True)
class Tallied:
    """Counts over a batch's rows, or over those of one bucket."""

    duplicates: int = 0
    """Rows that repeat an event_id of this batch."""
    missing_side: dict[str, int] = field(default_factory=dict)
    """Side table -> events without a row in it."""
    outside_window: int = 0
    """(event, action)s whose time lies outside [shown_at, shown_at + window): the bit is not set."""
    bad_action_times: int = 0
    """(event, action)s set by the row with a time that cannot be read: the bit is unknown."""

    def plus(self, other: Tallied) -> Tallied:
        """Return the sums."""
        names = [*self.missing_side, *(name for name in other.missing_side if name not in self.missing_side)]
        sums = {name: self.missing_side.get(name, 0) + other.missing_side.get(name, 0) for name in names}
        return Tallied(
            duplicates=self.duplicates + other.duplicates,
            missing_side=sums,
            outside_window=self.outside_window + other.outside_window,
            bad_action_times=self.bad_action_times + other.bad_action_times,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A bucket's events of a batch."""

    bucket: int
    events: pl.DataFrame
    """Unique events: `schema.event_schema` without `COMMITTED`, by cluster, user_id, shown_at and event_id."""
    clusters: pl.Series
    """Each event's cluster (`lake.clusters`), of all the bucket's events."""
    files: pl.Series
    """Place of each event's file in `Delivered.uris` (int32)."""
    counts: Tallied = Tallied()
    """What is counted only now; all zero where the batch has counted before."""


@dataclass(frozen=True, kw_only=True)
class Delivered(Tallied, ABC):
    """What `Batch` and `SpilledBatch` share."""

    feed: str
    quarantine: pl.DataFrame
    """`lake.quarantine.SCHEMA`: reason, feed, file (URI), row (the raw row as JSON text)."""
    read: int
    """Rows in the files: events + duplicates + quarantined + forgotten."""
    restated: int = 0
    """Of these, rows of earlier feed days that were read again."""
    forgotten: int = 0
    """Rows left out because their user asked to be forgotten; they stand nowhere else, not in quarantine either."""
    forgotten_ids: pl.Series = field(default_factory=lambda: pl.Series(dtype=pl.String))
    """event_ids of those rows, where actions feeds may bring rows about them; never stored."""
    unknown_columns: dict[str, int] = field(default_factory=dict)
    """Raw column that the config neither reads nor declares -> files that have it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What data checks compare with other days (`data.checks`), the counts of rows apart."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Feed day (ISO) -> digest of its files' identity; restated days first, ascending, the night's own last."""
    uris: tuple[str, ...] = ()
    """The files read."""
    file_days: tuple[int, ...] = ()
    """Place in `inputs` of each file's feed day."""
    newest: int | None = None
    """The newest shown_at that was read, microseconds since the epoch; None where the batch was made by hand."""

    @property
    def reasons(self) -> dict[str, int]:
        """Quarantined rows by reason."""
        counts = self.quarantine.group_by("reason").len().sort("reason")
        return {reason: int(number) for reason, number in counts.iter_rows()}

    @property
    def tallied(self) -> Tallied:
        """The counts that are known before the parts are gone through."""
        return Tallied(**{name: getattr(self, name) for name in Tallied.__dataclass_fields__})

    def named_files(self) -> tuple[str, ...]:
        """Return the files that `Part.files` counts through."""
        return self.uris

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Go through the buckets that have events, ascending; may be repeated."""

    @abstractmethod
    def keys(self) -> pl.DataFrame:
        """Return each pair of hash (uint64: event_id's without its lowest HASH_BITS bits) and bucket, in any order."""

    @abstractmethod
    def newest_us(self) -> int | None:
        """Return the newest shown_at in microseconds since the epoch; None without an event."""


@dataclass(frozen=True, kw_only=True)
class Batch(Delivered):
    """A batch in memory."""

    events: pl.DataFrame
    """Unique events: `schema.event_schema` without `COMMITTED`, by (bucket, user_id, shown_at, event_id)."""
    files: pl.Series
    """URI of the file that each event came from (text)."""

    def check(self) -> Self:
        """Raise AssertionError when a row was lost (a fault of ours, never of the data)."""
        if self.read != self.events.height + self.duplicates + self.quarantine.height + self.forgotten:
            raise AssertionError(
                f"rows lost: read {self.read}, events {self.events.height}, duplicates {self.duplicates}, "
                f"quarantined {self.quarantine.height}, forgotten {self.forgotten}"
            )
        return self

    def parts(self) -> Iterator[Part]:
        """Go through the buckets that have events, ascending."""
        names = {uri: place for place, uri in enumerate(self.named_files())}
        places = self.files.replace_strict(list(names), list(names.values()), return_dtype=pl.Int32).alias(FILE)
        split = self.events.with_columns(places).partition_by("bucket", as_dict=True, maintain_order=True)
        for key in sorted(split):
            found = clusters_of(split[key]["shown_at"].to_physical().to_numpy())
            events = split[key].with_columns(pl.Series(_CLUSTER, found)).sort(_CLUSTER, *EVENT_ORDER)
            own = events.drop(_CLUSTER, FILE)
            yield Part(bucket=int(key[0]), events=own, clusters=events[_CLUSTER], files=events[FILE])

    def named_files(self) -> tuple[str, ...]:
        """Return the files read; where the batch was made by hand, those its events name."""
        return self.uris or tuple(self.files.unique().sort().to_list())

    def keys(self) -> pl.DataFrame:
        """Return each pair of hash and bucket."""
        mark = pl.col("event_id").hash() // (1 << HASH_BITS)
        return self.events.select(mark.alias("hash"), "bucket").unique()

    def newest_us(self) -> int | None:
        """Return the newest shown_at in microseconds since the epoch; None without an event."""
        return newest_us(self.events) if self.newest is None else self.newest


@dataclass(frozen=True, kw_only=True)
class SpilledBatch(Delivered):
    """A batch on local disk, of which a bucket at a time is looked at."""

    config: Config
    shelf: Shelf
    """Rows that keep the contract, repeats included: `working_schema`."""
    users: BucketMap
    """Knows all users of the rows."""
    hashes: npt.NDArray[np.uint64]
    """uint64, sorted: a row's event_id hash with its bucket in the lowest HASH_BITS bits."""

    def parts(self) -> Iterator[Part]:
        """Go through the buckets that have events, ascending."""
        chosen = self._across()
        again = self.hashes[1:][self.hashes[1:] == self.hashes[:-1]]
        repeated = set(np.unique(again & np.uint64(_LOW)).tolist())
        for bucket in sorted(self.shelf.buckets):
            rows = self.shelf.take(bucket)
            events = unique(rows) if bucket in repeated else rows
            if not chosen.is_empty():
                elsewhere = chosen.filter(pl.col("bucket") != bucket)["event_id"]
                events = events.filter(~pl.col("event_id").is_in(elsewhere.implode()))
            counts = tally(self.config, rows.height, events)
            events, found = self.users.sort(events.select(*batch_columns(self.config), FILE))
            yield Part(bucket=bucket, events=events.drop(FILE), clusters=found, files=events[FILE], counts=counts)

    def keys(self) -> pl.DataFrame:
        """Return each pair of hash and bucket."""
        pairs = np.unique(self.hashes)
        return pl.DataFrame(
            {"hash": pairs >> np.uint64(HASH_BITS), "bucket": (pairs & np.uint64(_LOW)).astype(np.int32)}
        )

    def newest_us(self) -> int | None:
        """Return the newest shown_at in microseconds since the epoch; None without an event."""
        return self.newest

    def _across(self) -> pl.DataFrame:
        """Choose the bucket of each event_id that stands under users of several buckets: event_id, bucket."""
        marks = self.hashes >> np.uint64(HASH_BITS)
        buckets = self.hashes & np.uint64(_LOW)
        again = (marks[1:] == marks[:-1]) & (buckets[1:] != buckets[:-1])
        contested = pl.Series(_HASH, np.unique(marks[1:][again]))
        rows = [self.shelf.schema.to_frame()]
        if not contested.is_empty():
            mark = pl.col("event_id").hash() // (1 << HASH_BITS)
            parts = (self.shelf.take(bucket) for bucket in sorted(self.shelf.buckets))
            rows += [unique(part.filter(mark.is_in(contested.implode()))) for part in parts]
        every = pl.concat(rows)
        return unique(every.filter(pl.col("event_id").is_duplicated())).select("event_id", "bucket")


HASH_BITS = 12  # a lake has at most 4096 buckets
_LOW = (1 << HASH_BITS) - 1


def marked(rows: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return what `SpilledBatch.hashes` holds of some rows, unsorted."""
    hashes = rows["event_id"].hash().to_numpy() & ~np.uint64(_LOW)
    marks: npt.NDArray[np.uint64] = np.bitwise_or(hashes, rows["bucket"].to_numpy().astype(np.uint64))
    return marks


def polars_schema(config: Config) -> pl.Schema:
    """Return the event table's columns as Polars types, `COMMITTED` and `bucket` included."""
    return pl.Schema(_event_types(tuple(config.source.action_names), tuple(config.source.side_features)))


@functools.lru_cache(maxsize=16)
def _event_types(actions: tuple[str, ...], side: tuple[str, ...]) -> pl.Schema:
    empty = pl.from_arrow(pa.Table.from_batches([], schema=event_schema(actions, side)))
    assert isinstance(empty, pl.DataFrame)
    return empty.schema


def batch_columns(config: Config) -> list[str]:
    """Return the columns that a batch gives its events."""
    return [name for name in polars_schema(config).names() if name not in COMMITTED]


def working_schema(config: Config) -> pl.Schema:
    """Return the columns of rows that keep the contract, while they are still with their repeats."""
    kept = {name: dtype for name, dtype in polars_schema(config).items() if name not in (*COMMITTED, "bucket")}
    flags: dict[str, pl.DataType] = {not_found(table): pl.Boolean() for table in config.source.tables}
    counted: dict[str, pl.DataType] = {OUTSIDE: pl.Int32(), UNREADABLE: pl.Int32()}
    return pl.Schema({**kept, **counted, **flags, FILE: pl.Int32(), "bucket": pl.Int32()})


def unique(rows: pl.DataFrame) -> pl.DataFrame:
    """Keep one row of each event_id: the one that knows most, then with most actions, then by all it says."""
    repeated = rows["event_id"].is_duplicated()
    if not repeated.any():
        return rows
    content = [name for name in rows.columns if name not in (FILE, "bucket")]
    knows, does = (pl.col(name).bitwise_count_ones() for name in ("known", "actions"))
    # the file's place follows its name, so even equal rows are told apart without regard to listing order
    chosen = rows.filter(repeated).sort(
        pl.col("event_id"), knows, does, *content, FILE, descending=[False, True, True, *[False] * (len(content) + 1)]
    )
    return pl.concat([rows.filter(~repeated), chosen.unique("event_id", keep="first", maintain_order=True)])


def tally(config: Config, rows: int, events: pl.DataFrame) -> Tallied:
    """Count over unique events with `working_schema`'s columns that so many rows were made of."""
    return Tallied(
        duplicates=rows - events.height,
        missing_side={table.name: int(events[not_found(table)].sum()) for table in config.source.tables},
        outside_window=int(events[OUTSIDE].sum()),
        bad_action_times=int(events[UNREADABLE].sum()),
    )


def newest_us(rows: pl.DataFrame) -> int | None:
    """Return the newest shown_at of rows in microseconds since the epoch; None without a row."""
    newest = rows["shown_at"].to_physical().max()
    return newest if isinstance(newest, int) else None


class BucketMap:
    """The distinct users of a batch: their buckets, each hashed once, and their order."""

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        # codes last as long as a series that has them
        self._anchor = pl.Series(dtype=pl.Categorical(pl.Categories.random()))
        self._names = [pl.Series(dtype=pl.String)]
        self._buckets = np.empty(0, np.int32)
        self._ranked = pl.Series(dtype=pl.String)  # names in order
        self._ranks = np.empty(0, np.int64)

    def of(self, users: pl.Series) -> pl.Series:
        """Return each user's bucket; users are text, none null."""
        codes = self._codes(users)
        fresh = np.flatnonzero(codes >= len(self._buckets))
        if len(fresh):
            first = fresh[np.unique(codes[fresh], return_index=True)[1]]
            names = users.gather(first)
            self._names.append(names)
            hashed = np.array(buckets_of(names.to_list(), self._num_buckets), np.int32)
            self._buckets = np.concatenate([self._buckets, hashed])
        return pl.Series("bucket", self._buckets[codes], pl.Int32)

    def sort(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
        """Sort a bucket's rows by (cluster, user_id, shown_at, event_id): by numbers, text only where these are equal.

        Args:
            rows: Of known users.

        Returns:
            The rows, and their clusters (`lake.clusters`).
        """
        times = rows["shown_at"].to_physical().to_numpy()
        found = clusters_of(times)
        if rows.is_empty():
            return rows, pl.Series(_CLUSTER, found)
        self._rank()
        starts = np.full(int(found.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(starts, found, times)
        offsets = times - starts[found]
        unit = 1000 if not (offsets % 1000).any() else 1  # whole milliseconds need ten bits less
        offsets //= unit
        bits, user_bits = int(offsets.max()).bit_length(), len(self._ranks).bit_length()
        if bits + user_bits + len(starts).bit_length() > _KEY_BITS:
            rows = rows.with_columns(pl.Series(_CLUSTER, found)).sort(_CLUSTER, *EVENT_ORDER)
            return rows.drop(_CLUSTER), rows[_CLUSTER]
        keys = ((found.astype(np.int64) << user_bits) | self._ranks[self._codes(rows["user_id"])]) << bits | offsets
        order = pl.Series(keys).arg_sort().to_numpy().copy()
        keys = keys[order]
        equal = keys[1:] == keys[:-1]
        if equal.any():
            ties = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
            tied = pl.DataFrame({"key": keys[ties], "event": rows["event_id"].gather(order[ties])})
            order[ties] = order[ties][tied.select(pl.arg_sort_by("key", "event")).to_series().to_numpy()]
        # what the keys tell is read off them: gathering rows at random is what a sort costs most
        sorted_found = (keys >> (bits + user_bits)).astype(np.uint16)
        shown = (keys & ((1 << bits) - 1)) * unit + starts[sorted_found]
        known = [
            self._ranked.gather((keys >> bits) & ((1 << user_bits) - 1)).alias("user_id"),
            pl.Series("shown_at", shown).cast(rows.schema["shown_at"]),
        ]
        empty = [name for name in rows.columns if rows[name].null_count() == rows.height]  # in any order the same
        gathered = rows.drop("user_id", "shown_at", *empty)[order]
        told = gathered.with_columns(*known, *(rows[name] for name in empty)).select(rows.columns)
        return told, pl.Series(_CLUSTER, sorted_found)

    def _rank(self) -> None:
        """Order all users known so far by name."""
        if len(self._ranks) < len(self._buckets):
            names = pl.concat(self._names)
            order = names.arg_sort().to_numpy()
            self._ranked = names.gather(order)
            self._ranks = np.empty(len(order), np.int64)
            self._ranks[order] = np.arange(len(order))

    def _codes(self, users: pl.Series) -> npt.NDArray[np.uint32]:
        return users.cast(self._anchor.dtype).to_physical().to_numpy()
