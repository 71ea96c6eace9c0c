"""Raw files on S3: columns from their paths, and no more read of a text file than its head where that is asked."""

from __future__ import annotations

import gzip
import io
from typing import Any

import polars as pl
import pytest

from gr_core.lake import rawfile, store
from gr_core.stages import checking
from tests.feeds import DAY, make_config, read, rows
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

TYPES = {"id": "string", **dict.fromkeys(["uid", "item", "ts"], "int64"), "clicked": "int32", "liked": "int32"}


@pytest.mark.parametrize("form", ["parquet", "csv", "csv.gz", "ndjson.gz"])
def test_a_partitioned_day_on_s3(bucket: str, form: str) -> None:
    """Every format: read whole, its path's keys as columns, checked without a home."""
    frame = rows({"id": "a"}, {"id": "b", "uid": None}, uid=pl.Int64)
    content = io.BytesIO()
    if form == "parquet":
        frame.write_parquet(content)
    data = content.getvalue() or (frame.write_csv() if form.startswith("csv") else frame.write_ndjson()).encode()
    uri = f"{bucket}/raw/dt={DAY}/country=de/a.{form}"
    store.write_bytes(uri, gzip.compress(data) if form.endswith(".gz") else data)
    store.write_bytes(f"{bucket}/raw/dt={DAY}/country=de/_SUCCESS", b"")
    feed: dict[str, Any] = {
        "path": "dt={date}/**/*",
        "format": form.removesuffix(".gz"),
        "side": {"country": "country"},
    }
    config = make_config(f"{bucket}/raw", {**feed, "types": {} if form == "parquet" else TYPES})
    batch = read(config)

    assert batch.events["country"].to_list() == ["de"]
    assert batch.reasons == {"null_user": 1}
    value = checking.check(config, f"{bucket}/home", DAY)
    assert value["ok"]
    assert value["sample"][0]["reasons"] == {"null_user": 1}
    assert not store.exists(f"{bucket}/home")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_the_head_of_a_long_text_file(bucket: str, monkeypatch: pytest.MonkeyPatch, *, packed: bool) -> None:
    """A range of the object is read, and its rows are projected from it."""
    frame = pl.concat([rows({})] * 50_000).with_columns(pl.int_range(pl.len()).hash(7).cast(pl.String).alias("id"))
    data = frame.write_csv().encode()
    uri = f"{bucket}/long.csv{'.gz' if packed else ''}"
    content = gzip.compress(data) if packed else data
    store.write_bytes(uri, content)
    monkeypatch.setattr(rawfile, "_COUNTED_ROWS", 100)
    monkeypatch.setattr(store, "read_bytes", None)
    schema = rawfile.read_schema(uri, "csv", TYPES, "k")
    number, exact = rawfile.count_rows(uri, "csv", len(content))

    assert rawfile.read_frame(uri, "csv", TYPES, ["id"], schema, 10)["id"].to_list() == frame["id"].head(10).to_list()
    assert not exact
    assert number == pytest.approx(50_000, rel=0.5)
