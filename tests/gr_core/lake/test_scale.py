"""Ingestion at scale gives what ingestion in memory gives, for any number of buckets and any order of files."""

from __future__ import annotations

import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from gr_core.config import Config
from gr_core.data import contract
from gr_core.lake import shelf
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable
from gr_core.lake.source import list_files
from tests import feeds
from tests.feeds import NOON

DAYS = [date(2025, 6, 1) + timedelta(days=day) for day in range(3)]


def raw(number: int, user: int, *, hours: float, clicked: int | None = 0, item: int = 7) -> dict[str, Any]:
    """Return a raw row of the feed of `tests.feeds`, shown so many hours after noon of the first day."""
    shown = feeds.ms(NOON + timedelta(hours=hours))
    return {"id": f"e{number}", "uid": user, "item": item, "ts": shown, "clicked": clicked, "liked": 0}


def frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Return raw rows as a frame of fixed types."""
    schema = {
        "id": pl.String,
        "uid": pl.Int64,
        "item": pl.Int64,
        "ts": pl.Int64,
        "clicked": pl.Int64,
        "liked": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema)


def config_of(root: Path, buckets: int, **source: Any) -> Config:
    """Return a config with so many buckets, a small daily cap and a short reach for repeats."""
    return feeds.make_config(root, lake={"num_buckets": buckets}, daily_cap=3, dedup_days=2, **source)


def ingest(config: Config, home: Path, days: list[date]) -> tuple[EventTable, list[Commit]]:
    """Ingest days in their order."""
    table = EventTable(str(home / "lake" / "events"), config)
    feed = config.source.feeds[0]
    made = []
    for day in days:
        batch = contract.read_day(config, day, list_files(config, day, feed), feed=feed)
        made.append(table.ingest(day.isoformat(), batch, parent=None))
    return table, made


def outcome(table: EventTable, commits: list[Commit]) -> tuple[pl.DataFrame, list[Any], list[list[tuple[Any, ...]]]]:
    """Return what an ingestion left: rows without their bucket, counts, and quarantined rows."""
    rows = table.read(commits[-1].delta_version).drop("bucket").sort("event_id", "commit")
    counts = [
        (commit.rows, commit.updated, commit.reasons, commit.outside_window, commit.missing_side) for commit in commits
    ]
    quarantined = [
        table.quarantine(commit.number)
        .drop("file")
        .sort("reason", "row")
        .with_columns(pl.col("row").str.replace(r'"bucket":\d+', ""))
        .rows()
        for commit in commits
    ]
    return rows, counts, quarantined


ROW = st.builds(
    raw,
    st.integers(0, 12),
    st.integers(0, 5),
    hours=st.sampled_from([-70.0, -30.0, -5.0, 0.0, 1.0, 2.0, 11.9]),
    clicked=st.sampled_from([0, 1, None]),
    item=st.integers(6, 8),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nights=st.lists(st.lists(ROW, min_size=1, max_size=14), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_rows_do_not_depend_on_buckets_files_or_memory(
    tmp_path_factory: pytest.TempPathFactory, nights: list[list[dict[str, Any]]], seed: int
) -> None:
    """Property: one bucket or eight, one file or two in the other order, in memory or on disk: events, counts, quarantine."""
    path = tmp_path_factory.mktemp("scale")
    moved = [[{**row, "ts": row["ts"] + 86_400_000 * place} for row in night] for place, night in enumerate(nights)]
    for day, night in zip(DAYS, moved, strict=False):
        feeds.write(path / "one", frame(night), day=day)
        mixed = random.Random(seed).sample(night, len(night))
        feeds.write(path / "two", frame(mixed[len(mixed) // 2 :]), frame(mixed[: len(mixed) // 2]), day=day)
    days = DAYS[: len(nights)]
    expected = outcome(*ingest(config_of(path / "one", 1), path / "home1", days))
    others = []
    for buckets, root, limit in ((8, "one", 2), (8, "two", shelf.LIMIT), (1, "two", 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shelf, "LIMIT", limit)
            home = path / f"home-{buckets}-{root}-{limit}"
            others.append(outcome(*ingest(config_of(path / root, buckets), home, days)))
    for rows, counts, quarantined in others:
        assert_frame_equal(rows, expected[0])
        assert counts == expected[1]
        assert quarantined == expected[2]
