"""What a night costs when only the past grows: time a token, bytes read and bytes written, by the product's own stages.

A generated table of some days, committed day by day through the event table, its upkeep included; the events of the last
days are the same whatever came before. Then nights: ingestion and the sequences of every bucket, each from the night
before, judged over the last three. Bytes are those of files that appeared and of the row groups and ranges that were read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow.parquet as pq

from benchmarks._child import measure
from benchmarks._report import Figure, Report
from gr_core.config import Config, parse_config
from gr_core.data import due, ragged
from gr_core.data.batch import COMMITTED, Batch, polars_schema
from gr_core.hashing import bucket_of
from gr_core.lake import quarantine
from gr_core.lake.events import EventTable
from gr_core.lake.history import HistoryStore
from gr_core.night import Night, Parent
from gr_core.refs import Bound, day_end_us
from gr_core.stages import sequencing
from gr_core.stages.gathering import ROLES, Gatherer, history_columns

FIRST_DAY = date(2024, 1, 1)
_DAY_US = 86_400_000_000
_NUM_ITEMS = 5000
_ROWS_OF_INACTIVE = 30
_LATEST = 7  # days that a late row is late at most
_WINDOW = 3  # gate.nights
MAX_HISTORY = 64

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """How much came before the nights that are measured."""

    days: int
    """Days before them, each a commit."""
    inactive: int = 1
    """All users over active ones; the others have 30 events each, none in the last two weeks."""
    late: float = 0.0
    """Share of a day's rows that were shown up to a week earlier."""
    active_users: int = 2000
    events_a_day: int = 8000
    nights: int = 30
    num_buckets: int = 2
    seed: int = 0


def night_cost(work: str, **values: Any) -> dict[str, float]:
    """Build a table, run nights on it, and tell what they cost.

    Args:
        work: An empty folder.
        values: Fields of `Past`.

    Returns:
        seconds_per_token (median night), read_ratio (bytes read over the active users' capped histories),
        write_ratio (bytes written over the nights' new rows and their users' capped histories), tokens and rows a night, rows of the
        table, users whose history came from the store and from the table.
    """
    return _World(Path(work), Past(**values)).run()


def measure_cost(report: Report, work: Path, *, quick: bool) -> None:
    """Measure a night on 30 days, and on 360 days with ten times the users; once more with 2 % late rows.

    Args:
        report: Takes the figures.
        work: A folder for the tables.
        quick: Tiny sizes: does it run.
    """
    small: dict[str, Any] = {"active_users": 60, "events_a_day": 240, "nights": 3} if quick else {}
    days = (8, 16) if quick else (30, 360)
    for suffix, late in (("", 0.0), ("_late", 0.02)):
        found = []
        for name, past, inactive in (("short", days[0], 1), ("long", days[1], 10)):
            folder = work / f"cost-{name}{suffix}"
            asked = {"work": str(folder), "days": past, "inactive": inactive, "late": late, **small}
            found.append(measure("benchmarks._cost:night_cost", **asked).result)
        short, long = found
        growth = long["seconds_per_token"] / short["seconds_per_token"]
        report.figures |= {
            f"night/time_per_token_growth{suffix}": Figure(
                value=growth, unit="times", at_most=1.5, baseline=short["seconds_per_token"] * 1e6
            ),
            f"night/bytes_read{suffix}": Figure(
                value=long["read_ratio"], unit="of capped histories", at_most=3, baseline=short["read_ratio"]
            ),
            f"night/bytes_written{suffix}": Figure(
                value=long["write_ratio"],
                unit="of new rows and touched histories",
                at_most=3,
                baseline=short["write_ratio"],
            ),
        }


@dataclass(kw_only=True, slots=True)
class _Spent:
    """Of one night."""

    seconds: float
    tokens: int
    read: int
    capped: float
    """Bytes of the active users' capped histories."""
    written: int
    new: float
    """Bytes of the new rows, and of the capped histories of their users."""
    sources: tuple[int, int]
    """Users whose history came from the store, and who were read whole."""


class _MeteredTable(EventTable):
    """An event table that counts the bytes of the row groups it has to read."""

    bytes_read = 0
    _asked: Sequence[str] | None = None

    def read_users(self, *arguments: Any, users: Sequence[str], **named: Any) -> pl.DataFrame:
        """Read users' rows, counting the row groups that one of them may be in."""
        self._asked = sorted(users)
        try:
            return super().read_users(*arguments, users=users, **named)
        finally:
            self._asked = None

    def _rows(self, files: pl.DataFrame, wanted: list[pl.Expr], columns: Sequence[str] | None) -> pl.DataFrame:
        names = {*(columns or polars_schema(self.config).names()), "commit", "updated", "shown_at", "user_id"}
        self.bytes_read += sum(_group_bytes(uri, names, self._asked) for uri in files["uri"])
        return super()._rows(files, wanted, columns)


def _group_bytes(path: str, columns: Iterable[str], users: Sequence[str] | None) -> int:
    """Return the compressed bytes of columns, in all row groups or in those that may hold one of the (sorted) users."""
    told, total, asked = pq.read_metadata(path), 0, np.array(users or [], dtype=object)
    for number in range(told.num_row_groups):
        group = told.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        if users is not None:
            own = next(chunk for chunk in chunks if chunk.path_in_schema == "user_id").statistics
            first = np.searchsorted(asked, own.min)
            if first == len(asked) or asked[first] > own.max:
                continue
        total += sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in columns)
    return total


@dataclass
class _World:
    """One table and its nights."""

    work: Path
    past: Past
    bounds: list[Bound] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the config and the table's handle."""
        self.config = _config(self.work, self.past)
        self.home = str(self.work / "home")
        self.table = EventTable(str(self.work / "home" / "lake" / "events"), self.config)
        users = self.past.active_users * self.past.inactive
        self.names = np.array([f"user-{number:07d}" for number in range(users)], dtype=object)
        self.buckets = np.array([bucket_of(name, self.past.num_buckets) for name in self.names], dtype=np.int32)
        self.events = np.zeros(users, dtype=np.int64)
        activity = np.random.default_rng(self.past.seed).lognormal(sigma=0.8, size=self.past.active_users)
        self.shares = activity / activity.sum()

    def run(self) -> dict[str, float]:
        """Commit the past, build the first night in full, then measure."""
        for number in range(-self.past.days, 0):
            self.ingest(number)
        night = self.night(-1, parent=None)
        for bucket in range(self.past.num_buckets):
            sequencing.build_bucket(night, self.ingested(), bucket)
        spent = [self.measured(number) for number in range(self.past.nights)]
        return {
            "seconds_per_token": statistics.median(one.seconds / one.tokens for one in spent),
            "read_ratio": sum(one.read for one in spent) / sum(one.capped for one in spent),
            "write_ratio": sum(one.written for one in spent) / sum(one.new for one in spent),
            "tokens": statistics.mean(one.tokens for one in spent),
            "rows": float(self.past.events_a_day),
            "table_rows": float(self.events.sum()),
            "from_store": float(sum(one.sources[0] for one in spent)),
            "from_table": float(sum(one.sources[1] for one in spent)),
        }

    def measured(self, number: int) -> _Spent:
        """Run a night and tell what it cost."""
        before = _files(self.work)
        began = time.perf_counter()
        touched = self.ingest(number, upkeep=False)
        ingesting = time.perf_counter() - began
        committed = _grown(before, {path: n for path, n in _files(self.work).items() if path.endswith(".parquet")})
        night, ingested = self.night(number, parent=self.bounds[-2]), self.ingested()
        read, capped, per_row = 0, 0.0, self.bytes_a_row()
        for bucket in range(self.past.num_buckets):
            table = _MeteredTable(self.table.uri, self.config)
            rows = Gatherer(
                table=table,
                history=self.store(bucket),
                scope=sequencing.due_scope(night, ingested),
                rules=sequencing.sequence_rules(self.config),
                bucket=bucket,
                holdout_fraction=self.config.lake.holdout_fraction,
            ).gather(advance=False)
            is_target = pl.any_horizontal(pl.col(role) != 0 for role in ROLES)
            active = rows.rows.filter(is_target)["user_id"].unique().str.slice(5).cast(pl.Int64).to_numpy()
            capped += self.capped_rows(active) * per_row
            read += table.bytes_read
        built, seconds = [], 0.0
        for bucket in range(self.past.num_buckets):
            began = time.perf_counter()
            built.append(sequencing.build_bucket(night, ingested, bucket))
            seconds += time.perf_counter() - began
        self.table.maintain(keep_versions=[self.bounds[-1].delta_version])
        after = _files(self.work)
        return _Spent(
            seconds=ingesting + seconds,
            tokens=sum(_tokens(Path(one["uri"])) for one in built),
            read=read + sum(one["bytes"]["history_read"] for one in built),
            capped=capped,
            written=_grown(before, after),
            new=committed + self.capped_rows(touched) * per_row,
            sources=(
                sum(one["users"]["from_store"] for one in built),
                sum(one["users"]["from_table"] for one in built),
            ),
        )

    def capped_rows(self, users: Longs) -> int:
        """Return how many events the capped histories of users hold."""
        return int(np.minimum(self.events[users], MAX_HISTORY).sum())

    def ingest(self, number: int, *, upkeep: bool = True) -> Longs:
        """Commit a day, note its bound, and return its users."""
        frame = self.day_rows(number)
        batch = Batch(
            feed="log",
            events=frame,
            files=pl.Series(["day"] * frame.height),
            quarantine=pl.DataFrame(schema=quarantine.SCHEMA),
            read=frame.height,
        )
        made = self.table.ingest(self.day(number).isoformat(), batch, parent=self.bounds[-1] if self.bounds else None)
        cutoff = day_end_us(self.day(number), "UTC")
        self.bounds.append(due.make_bound(self.config, made.number, cutoff, made.delta_version, None))
        if upkeep:
            self.table.maintain(keep_versions=[made.delta_version])
        return frame["user_id"].unique().str.slice(5).cast(pl.Int64).to_numpy()

    def day_rows(self, number: int) -> pl.DataFrame:
        """Return a day's events; the active users' are the same whatever else there is."""
        past = self.past
        rng = np.random.default_rng([past.seed, number + 10_000])
        user = rng.choice(past.active_users, past.events_a_day, p=self.shares)
        late = np.where(rng.random(len(user)) < past.late, rng.integers(1, _LATEST + 1, len(user)), 0)
        start = (self.day(number) - date(1970, 1, 1)).days * _DAY_US
        shown = start - late * _DAY_US + rng.integers(0, _DAY_US, len(user))
        idle, quiet = len(self.names) - past.active_users, min(14, past.days // 2)
        if idle and number < -quiet:
            others = np.random.default_rng([past.seed, number + 10_000, 1])
            size = _ROWS_OF_INACTIVE * idle // (past.days - quiet)
            user = np.append(user, past.active_users + others.integers(0, idle, size))
            shown = np.append(shown, start + others.integers(0, _DAY_US, size))
        self.events += np.bincount(user, minlength=len(self.events))
        clicked = rng.random(len(user)) < 0.2
        instant = pl.Datetime("us", "UTC")
        frame = pl.DataFrame(
            {
                "event_id": [f"{number + 10_000}-{place}" for place in range(len(user))],
                "user_id": self.names[user],
                "item_id": pl.Series(rng.integers(0, _NUM_ITEMS, len(user))).cast(pl.String),
                "shown_at": pl.Series(shown).cast(instant),
                "visible_at": pl.Series(shown + 60_000_000).cast(instant),
                "actions": clicked.astype(np.int32),
                "known": np.ones(len(user), np.int32),
                "click_at": pl.Series(shown + 5_000_000).cast(instant).set(pl.Series(~clicked), None),
                "kind": pl.Series(rng.integers(0, 32, len(user))).cast(pl.String),
                "surface": pl.Series(rng.integers(0, 4, len(user))).cast(pl.String),
                "request_id": pl.Series([None] * len(user), dtype=pl.String),
                "bucket": self.buckets[user],
            },
            schema_overrides={"user_id": pl.String},
        )
        names = [name for name in polars_schema(self.config).names() if name not in COMMITTED]
        return frame.select(names).sort("bucket", "user_id", "shown_at", "event_id")

    def day(self, number: int) -> date:
        """Return the date of a day; 0 is the first measured night."""
        return FIRST_DAY + timedelta(days=self.past.days + number)

    def night(self, number: int, parent: Bound | None) -> Night:
        """Return the pinned night of a day, started from another's bound."""
        made = None
        if parent is not None:
            made = Parent(version=1, date="", checkpoint="", vocabulary="", watermark=parent)
        return Night(
            key=self.day(number).isoformat(),
            date=self.day(number).isoformat(),
            mode="nightly",
            home=self.home,
            config=self.config.resolved(),
            parent=made,
            cutoff_us=self.bounds[-1].cutoff_us,
            seed=0,
            at_us=0,
        )

    def ingested(self) -> dict[str, Any]:
        """Return what the ingest stage would have told of the newest commit."""
        return {
            "bound": self.bounds[-1].to_json(),
            "earlier": [bound.to_json() for bound in self.bounds[:-1]],
            "since": self.bounds[-1 - _WINDOW].to_json() if len(self.bounds) > _WINDOW else None,
            "context_commits": [],
        }

    def store(self, bucket: int) -> HistoryStore:
        """Return a bucket's history store."""
        rules = sequencing.sequence_rules(self.config)
        return HistoryStore(sequencing.history_uri(self.home), bucket, history_columns(rules), MAX_HISTORY)

    def bytes_a_row(self) -> float:
        """Return the bytes of a row of history as the store keeps it."""
        snapshot = self.store(0).snapshot(self.bounds[-1].delta_version, self.bounds[-1].commit, 0)
        assert snapshot is not None
        generations = [reader.generation for reader in snapshot.readers]
        return sum(one.data_bytes for one in generations) / sum(one.rows for one in generations)


def _config(work: Path, past: Past) -> Config:
    feed = {
        "name": "log",
        "path": "{date}.parquet",
        "event_id": "id",
        "shown_at": {"column": "shown"},
        "columns": {"user_id": "user", "item_id": "item"},
        "side": {"kind": "kind", "surface": "surface"},
    }
    return parse_config(
        {
            "name": "cost",
            "lake": {"num_buckets": past.num_buckets, "holdout_fraction": 0.05},
            "source": {"root": str(work), "actions": [{"name": "click"}], "feeds": [feed], "daily_cap": 1000},
            "sequences": {"max_history": MAX_HISTORY},
            "model": {"item_features": ["item_id", "kind"], "context_features": ["surface"]},
            "gate": {"nights": _WINDOW},
        }
    )


def _tokens(folder: Path) -> int:
    """Return the tokens of a bucket's segments, each segment once."""
    found = ragged.read(folder)
    return int(found.history.sum(dtype=np.int64) + found.targets.sum(dtype=np.int64))


def _files(work: Path) -> dict[str, int]:
    """Return the lake's files and their sizes; written once each, so a file that appears was written."""
    return {str(path): path.stat().st_size for path in (work / "home" / "lake").rglob("*") if path.is_file()}


def _grown(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(size for path, size in after.items() if path not in before)
