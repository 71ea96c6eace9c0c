"""Raw files on S3: what tools leave beside data is no data, and a feed reads as it does from a disk."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import polars as pl
import pytest

from gr_core.errors import ConfigError, DataContractError
from gr_core.lake import remote, store
from gr_core.lake.source import list_files
from tests import feeds
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]


def put_day(bucket: str, folder: Path, *frames: pl.DataFrame, day: date = feeds.DAY) -> None:
    """Write a day's parts and upload them."""
    feeds.write(folder, *frames, day=day)
    for path in folder.rglob("*.parquet"):
        store.write_bytes(store.join(bucket, "raw", path.relative_to(folder).as_posix()), path.read_bytes())


def put_empty(bucket: str, name: str) -> None:
    """Write an object without bytes."""
    remote.filesystem().call_s3("put_object", Bucket=bucket.removeprefix("s3://"), Key=name, Body=b"")


def test_junk_is_ignored_and_a_broken_upload_named(bucket: str, tmp_path: Path) -> None:
    """A directory marker, _SUCCESS and a temporary file are no data; a part without bytes stops by name (case C15)."""
    config = feeds.make_config(f"{bucket}/raw")  # type: ignore[arg-type]  # a root is text in the end
    put_day(bucket, tmp_path, feeds.rows({}, {}))
    for name in ("", "_SUCCESS", ".tmp-x.parquet", "_temporary/0/part-9.parquet"):
        put_empty(bucket, f"raw/dt={feeds.DAY}/{name}")

    assert [file.uri for file in list_files(config, feeds.DAY, config.source.feeds[0])] == [
        f"{bucket}/raw/dt={feeds.DAY}/part-0.parquet"
    ]
    assert feeds.read(config).events.height == 2

    put_empty(bucket, f"raw/dt={feeds.DAY}/part-1.parquet")
    with pytest.raises(DataContractError, match=r"part-1\.parquet: the file has no bytes"):
        feeds.read(config)


def test_a_file_that_came_meanwhile_is_read_and_a_deleted_one_is_not(bucket: str, tmp_path: Path) -> None:
    """A day listed, then changed by another process, is listed as it is now; overwritten files have other ETags (C3)."""
    config = feeds.make_config(f"{bucket}/raw")  # type: ignore[arg-type]  # a root is text in the end
    feed = config.source.feeds[0]
    put_day(bucket, tmp_path, feeds.rows({}), feeds.rows({}))
    first = list_files(config, feeds.DAY, feed)

    put_day(bucket, tmp_path, feeds.rows({}, {}))
    store.remove(first[1].uri)

    second = list_files(config, feeds.DAY, feed)
    assert [file.uri for file in second] == [first[0].uri]
    assert second[0].etag != first[0].etag


def test_a_missing_bucket_is_no_missing_day(s3_endpoint: str, bucket: str) -> None:
    """A source in a bucket that is not there is named as such."""
    config = feeds.make_config("s3://nowhere/raw")  # type: ignore[arg-type]  # a root is text in the end
    with pytest.raises(ConfigError, match="bucket nowhere: there is no such bucket"):
        list_files(config, feeds.DAY, config.source.feeds[0])
