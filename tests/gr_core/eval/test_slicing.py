"""Slices as the config parts events, and the table of a night: one row a metric."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import numpy as np
import polars as pl

from gr_core.config import SliceConfig
from gr_core.eval.slices import METRICS, Slicing
from gr_core.eval.slicing import TABLE, as_csv, as_parquet, by_day, by_feature, by_history, by_items, long_table


def members(made: Slicing) -> dict[str, list[int]]:
    return {name: np.flatnonzero(made.place == number).tolist() for number, name in enumerate(made.slices)}


def feature(**more: object) -> SliceConfig:
    return SliceConfig.model_validate({"name": "surface", "by": "feature", "feature": "tab"} | more)


def test_the_most_frequent_values_have_a_slice_each() -> None:
    """The rest is `other`, null is `unknown`; equal counts go by name, so the slices are the same in every run."""
    values = pl.Series("rows", ["b", "a", None, "b", "c", None, "d", "a"])

    assert members(by_feature(feature(max_values=3), values)) == {
        "surface=a": [1, 7],
        "surface=b": [0, 3],
        "surface=unknown": [2, 5],
        "surface=other": [4, 6],
    }
    assert by_feature(feature(), values).labels == ("a", "b", "c", "d", "unknown")
    assert by_feature(feature(), values.clear()).labels == ()


def test_named_values_are_there_without_rows_too() -> None:
    """Values of the config have their slice every night; a value that is called `other` joins the rest."""
    values = pl.Series(["a", "x", "other"])

    assert members(by_feature(feature(values=("a", "z")), values)) == {
        "surface=a": [0],
        "surface=z": [],
        "surface=other": [1, 2],
    }
    assert members(by_feature(feature(values=("other", "a")), values)) == {"surface=other": [1, 2], "surface=a": [0]}


def test_history_and_items_part_everything() -> None:
    """A bound belongs to the slice that begins there."""
    one = SliceConfig(name="activity", by="history", bounds=(1, 20), veto=False)

    made = by_history(one, np.array([0, 1, 19, 20, 500]))

    assert members(made) == {"activity=new": [0], "activity=seldom": [1, 2], "activity=heavy": [3, 4]}
    assert made.veto is False
    items = by_items(SliceConfig(name="items", by="items"), np.array([True, False]))
    assert members(items) == {"items=new": [0], "items=known": [1]}


def test_days_are_those_of_the_lakes_zone() -> None:
    """22:30 UTC is the next day in Moscow."""
    at = np.array([int(datetime(2025, 6, 1, hour, 30, tzinfo=UTC).timestamp()) * 10**6 for hour in (20, 22)])

    assert members(by_day(at, "UTC")) == {"day=2025-06-01": [0, 1]}
    assert members(by_day(at, "Europe/Moscow")) == {"day=2025-06-01": [0], "day=2025-06-02": [1]}


def test_the_table_has_one_row_a_metric() -> None:
    """Undefined values are null beside their counts; Parquet and CSV hold the same rows, equal bytes for equal rows."""
    row = {"role": "holdout", "model": 3, "slice": "s=a", "action": "click", "count": 5, "positives": 0, "users": 2}
    row |= dict.fromkeys(METRICS) | {"log_loss": 0.5, "auc_error": None, "ne_error": 0.1, "ne": 0.9}

    table = long_table("2025-06-01", [row])

    assert table.schema == TABLE
    assert table.height == len(METRICS) == table.select("role", "model", "action", "slice", "metric").n_unique()
    assert table.filter(metric="ne").row(0, named=True) == {
        **{key: row[key] for key in ("role", "model", "slice", "action", "count", "positives", "users")},
        "night": "2025-06-01",
        "metric": "ne",
        "value": 0.9,
        "error": 0.1,
    }
    assert table.filter(metric="auc")["value"].to_list() == [None]
    assert pl.read_parquet(io.BytesIO(as_parquet(table))).equals(table)
    assert as_parquet(table) == as_parquet(long_table("2025-06-01", [row]))
    assert pl.read_csv(as_csv(table).encode(), schema=TABLE).equals(table)
    assert long_table("n", []).schema == TABLE
