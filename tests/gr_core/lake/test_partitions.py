"""Hive partitions: key=value folders of a raw file's path are columns, typed by declaration."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.errors import DataContractError
from gr_core.lake import partitions
from gr_core.lake.source import preflight
from tests.feeds import DAY, make_config, read, rows

FEED = {
    "path": "dt={date}/**/*.parquet",
    "side": {"country": "country", "hour": "hour + 1"},
    "types": {"hour": "int32"},
}


def put(root: Path, folders: str, frame: pl.DataFrame, name: str = "a.parquet") -> Path:
    path = root / f"dt={DAY}" / folders / name
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(path)
    return path


def test_the_keys_of_a_path_are_columns(tmp_path: Path) -> None:
    """Text by default, typed where declared, percent-decoded; Hive's name for a null is null."""
    put(tmp_path, "country=de/hour=07", rows({"id": "a"}))
    put(tmp_path, "country=c%C3%B4te%20d%27ivoire/hour=8", rows({"id": "b"}))
    put(tmp_path, f"country={partitions.NULL}/hour={partitions.NULL}", rows({"id": "c"}))
    events = read(make_config(tmp_path, FEED)).events.sort("event_id")

    assert events.select("country", "hour").rows() == [("de", "8"), ("côte d'ivoire", "9"), (None, None)]


def test_a_key_that_is_not_declared_stays_text(tmp_path: Path) -> None:
    """Nothing is inferred: hour=07 is 07, and dt is the day as it stands in the path."""
    put(tmp_path, "hour=07", rows({}))
    events = read(make_config(tmp_path, {**FEED, "types": {}, "side": {"hour": "hour", "day": "dt"}})).events

    assert events.select("hour", "day").rows() == [("07", "2025-06-01")]


def test_a_files_own_column_counts_before_its_path(tmp_path: Path) -> None:
    """What a file says of a row is not overwritten by its folder, also where it says null."""
    put(tmp_path, "country=de", rows({"country": "at"}, {"country": None}))
    events = read(make_config(tmp_path, {**FEED, "side": {"country": "country"}})).events.sort("event_id")

    assert events["country"].to_list() == ["at", None]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("form", ["csv", "ndjson"])
def test_text_files_have_their_paths_columns_too(tmp_path: Path, form: str, packed: bool) -> None:  # noqa: FBT001
    """A csv and an ndjson, each also gzip-compressed; an ndjson record's own value counts where it has one."""
    folder = tmp_path / f"dt={DAY}" / "country=de"
    folder.mkdir(parents=True)
    frame = rows({"id": "a"}, {"id": "b"})
    own = '"country":"at",' if form == "ndjson" else ""
    text = frame.write_csv() if form == "csv" else frame.write_ndjson().replace('{"id":"b",', f'{{{own}"id":"b",')
    content = gzip.compress(text.encode()) if packed else text.encode()
    (folder / f"a.{form}{'.gz' if packed else ''}").write_bytes(content)
    types = {"id": "string", **dict.fromkeys(["uid", "item", "ts", "clicked", "liked"], "int64"), "country": "string"}
    feed = {"path": "dt={date}/**/*", "format": form, "types": types, "side": {"country": "country"}}
    events = read(make_config(tmp_path, feed)).events.sort("event_id")

    assert events["country"].to_list() == ["de", "de" if form == "csv" else "at"]


def test_a_key_that_is_not_of_its_declared_type_is_an_error(tmp_path: Path) -> None:
    """It holds for every row of the file, so the file, the key and its value are named before any state changes."""
    put(tmp_path, "country=de/hour=late", rows({}))

    with pytest.raises(DataContractError, match=r"hour=late/a\.parquet: the path gives hour = 'late'.*types"):
        preflight(make_config(tmp_path, FEED), DAY, bootstrap=False)


def test_a_missing_column_is_told_apart_from_what_the_path_gives(tmp_path: Path) -> None:
    """The columns of the file and those of its path are named."""
    put(tmp_path, "country=de", rows({}).drop("item"))

    with pytest.raises(DataContractError, match=r"'uid'\] and, from its path, \['country', 'dt'\]"):
        preflight(make_config(tmp_path, {"path": "dt={date}/**/*.parquet"}), DAY, bootstrap=False)


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [
        ("7", pl.Int64, 7),
        ("0.5", pl.Float64, 0.5),
        ("TRUE", pl.Boolean, True),
        ("0", pl.Boolean, False),
        ("", pl.String, ""),
    ],
)
def test_values_are_read_in_their_types(text: str, dtype: Any, value: Any) -> None:
    """Every declared type; the last of two equal keys counts, and a file name is no key."""
    assert partitions.typed(f"s3://b/k=x/k={text}/a=b.csv", {"k": dtype()}, "o") == {"k": (dtype(), value)}
