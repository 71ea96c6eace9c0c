"""Generated raw feeds of any size: heavy-tailed users, popular items, sessions; daily parquet files and a config.

In: how many events over how many days. Out: `history/date=.../part-0.parquet` for the days before the first night,
`nights/date=.../part-0.parquet` for it and later ones, and the config that reads them. The rows of a day depend on the
seed and the day's number alone. Nothing here is learnable; what it is made for is the data plane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gr_core.config import Config, parse_config

FIRST_DAY = date(2024, 1, 1)
DAY_MS = 86_400_000
MEAN_SESSION = 8
ACTIONS = ("click", "like", "watched")
EVENTS_A_USER = 26.6
"""20 million events of about 752,000 users."""
_SIGMA = (
    1.5  # of the logarithm of a user's activity: the most active of 752,000 has some ten thousand events in 360 days
)
_POPULARITY = 0.9  # exponent of an item's popularity by rank
_NUM_CATEGORIES = 64
_SURFACES = ("home", "search", "related", "inbox")
_SESSIONS_A_USER = EVENTS_A_USER / MEAN_SESSION

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """A generated feed."""

    num_events: int
    """Over all days; every day has the same number."""
    num_days: int = 360
    """The last of them is the first night's."""
    seed: int = 0
    num_buckets: int | None = None
    """lake.num_buckets; None: the default of 8, and one for two and a half million events."""
    num_users: int | None = None
    """Users with an event, about; None: as many as `EVENTS_A_USER` gives."""

    @property
    def events_a_day(self) -> int:
        """Rows of a day's file."""
        return max(self.num_events // self.num_days, 1)

    @property
    def buckets(self) -> int:
        """lake.num_buckets."""
        return self.num_buckets or max(8, -(-self.num_events // 2_500_000))

    @property
    def first_night(self) -> date:
        """The day of the first night, the last of `num_days`."""
        return self.day(self.num_days - 1)

    def day(self, number: int) -> date:
        """Return the date of a day by its number."""
        return FIRST_DAY + timedelta(days=number)


def fields_of(feed: Feed) -> dict[str, Any]:
    """Return a feed's fields as JSON values."""
    return {name: getattr(feed, name) for name in Feed.__slots__}


@dataclass(frozen=True, kw_only=True)
class Population:
    """Who is active how often, and which items are shown how often."""

    users: npt.NDArray[np.float64]
    """Cumulative shares of sessions."""
    items: npt.NDArray[np.float64]
    """Cumulative shares of impressions, most popular first."""
    clicks: npt.NDArray[np.float32] = field(repr=False)
    """Each user's click rate."""


def population_of(feed: Feed) -> Population:
    """Return the population of a feed: as many users that about the wanted number has a session in all days."""
    rng = np.random.default_rng([feed.seed, 0])
    wanted = feed.num_users or round(feed.num_events / EVENTS_A_USER)
    sessions = feed.num_events / MEAN_SESSION
    # The share of a lognormal population with at least one session, which only their ratio decides.
    sample = np.exp(np.random.default_rng(0).normal(-(_SIGMA**2) / 2, _SIGMA, 100_000))
    low, high = 1.0, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        seen = middle * (1 - np.exp(-sample * sessions / (middle * wanted))).mean()
        low, high = (middle, high) if seen < 1 else (low, middle)
    activity = np.exp(rng.normal(0, _SIGMA, max(round(low * wanted), 2)))
    popularity = np.arange(1, max(feed.num_events // 100, 1000) + 1) ** -_POPULARITY
    return Population(
        users=np.cumsum(activity) / activity.sum(),
        items=np.cumsum(popularity) / popularity.sum(),
        clicks=rng.beta(2, 8, len(activity)).astype(np.float32),
    )


def day_rows(feed: Feed, people: Population, number: int) -> pa.Table:
    """Return the raw rows of a day, in the order of their times.

    Returns:
        id, uid, item (int64), ts (int64, ms), click, like, watched (bool), category, surface (text).
    """
    rng = np.random.default_rng([feed.seed, 1, number])
    size = feed.events_a_day
    lengths = rng.integers(1, 2 * MEAN_SESSION, size // MEAN_SESSION + 8)
    session = np.repeat(np.arange(len(lengths)), lengths)
    session = np.resize(session, size)
    user = _pick(people.users, rng.random(len(lengths)))[session]
    item = _pick(people.items, rng.random(size))
    begin = rng.integers(0, DAY_MS - 3_600_000, len(lengths))
    start = int(datetime.combine(feed.day(number), datetime.min.time(), UTC).timestamp()) * 1000
    shown = start + begin[session] + np.cumsum(rng.integers(2_000, 60_000, size)) % 3_600_000
    draw = rng.random((3, size), np.float32)
    click = draw[0] < people.clicks[user]
    # Ids look like ids: spread over a wide range, one to one with the numbers.
    rows = {
        "id": np.arange(size, dtype=np.int64) + number * size,
        "uid": _spread(user),
        "item": _spread(item),
        "ts": shown,
        "click": click,
        "like": click & (draw[1] < 0.2),
        "watched": click | (draw[2] < 0.3),
        "category": item % _NUM_CATEGORIES,
        "surface": (user + session) % len(_SURFACES),
    }
    order = np.argsort(shown, kind="stable")
    columns: dict[str, Any] = {name: pa.array(values[order]) for name, values in rows.items()}
    for name, words in (("category", [f"c{n:02d}" for n in range(_NUM_CATEGORIES)]), ("surface", _SURFACES)):
        columns[name] = pa.array(words).take(columns[name])
    return pa.table(columns)


def write_feed(root: Path, feed: Feed, *, nights: int = 1) -> dict[str, int]:
    """Write a feed day by day.

    Args:
        root: The folder that the config names as source.root.
        feed: The feed.
        nights: Days from the first night's on; more than one continue behind `num_days`.

    Returns:
        rows (of all files), files, bytes (of all files).
    """
    people = population_of(feed)
    found = {"rows": 0, "files": 0, "bytes": 0}
    for number in range(feed.num_days + nights - 1):
        kind = "history" if number < feed.num_days - 1 else "nights"
        path = root / kind / f"date={feed.day(number)}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = day_rows(feed, people, number)
        pq.write_table(rows, path)
        found["rows"] += len(rows)
        found["files"] += 1
        found["bytes"] += path.stat().st_size
    return found


def write(root: str, feed: dict[str, Any], nights: int) -> dict[str, int]:
    """Write a feed in a child; see `write_feed`."""
    return write_feed(Path(root), Feed(**feed), nights=nights)


def files_of(root: str) -> list[str]:
    """Return the files of the history and of the first night."""
    history, nights = (sorted(Path(root).glob(f"{kind}/date=*/*.parquet")) for kind in ("history", "nights"))
    return [str(file) for file in (*history, *nights[:1])]


def config_of(root: Path, feed: Feed, *, bootstrap_due: bool = True, **sections: Mapping[str, Any]) -> Config:
    """Return the config that reads a feed: the history as bootstrap, the nights as events.

    Args:
        root: Where `write_feed` wrote.
        feed: The feed.
        bootstrap_due: Whether the history is supervised by the first night, or context only.
        sections: Keys that differ from the ones here, by section (sequences, pack, lake, ...).

    Returns:
        The config; every action is final in its row, so all is due at once.
    """
    columns = {
        "event_id": "id",
        "shown_at": {"column": "ts", "unit": "ms"},
        "columns": {"user_id": "uid", "item_id": "item"},
        "actions": {"click": "click", "like": '"like"', "watched": "watched"},
        "side": {"category": "category", "surface": "surface"},
    }
    history = {"name": "history", "role": "bootstrap", "path": "history/date=*/*.parquet", "due": bootstrap_due}
    nights = {"name": "impressions", "path": "nights/date={date}/*.parquet"}
    raw: dict[str, Any] = {
        "name": "benchmark",
        "lake": {"num_buckets": feed.buckets, "holdout_fraction": 0.05},
        "source": {
            "root": str(root),
            "visibility_delay_seconds": 60,
            "actions": [{"name": name} for name in ACTIONS],
            "feeds": [history | columns, nights | columns],
        },
        "sequences": {"max_history": 128, "max_targets": 64},
        "vocabulary": {"item_id": {"min_count": 2}},
        "pack": {"token_budget": 8192},
        "model": {
            "width": 32,
            "num_heads": 2,
            "item_features": ["item_id", "category"],
            "context_features": ["surface"],
        },
    }
    for section, keys in sections.items():
        raw[section] = {**raw.get(section, {}), **keys}
    return parse_config(raw)


def _pick(cumulative: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]) -> Longs:
    """Return the number that each draw falls on; sorted look-ups are several times faster than scattered ones."""
    order = np.argsort(draws)
    found = np.empty(len(draws), np.int64)
    found[order] = np.minimum(np.searchsorted(cumulative, draws[order], side="right"), len(cumulative) - 1)
    return found


def _spread(numbers: Longs) -> Longs:
    """Return ids: one to one with numbers below 2^40."""
    return (numbers * 0x9E3779B1 + 12_345) % (1 << 40)
