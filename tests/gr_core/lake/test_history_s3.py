"""The history store on an S3 server: entries by ranged reads, the same content, nothing left of a purged user."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from gr_core.errors import FormatError
from gr_core.lake import history_file, store
from gr_core.lake.history import Cut, HistoryStore
from gr_core.lake.history_entries import HistoryColumns
from gr_core.refs import NEVER
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

COLUMNS = HistoryColumns(texts=("event_id", "item_id"), times=("click_at",))
TIME = pl.Datetime("us", "UTC")


def rows_of(users: list[str], tag: str) -> pl.DataFrame:
    """Return two rows of each user."""
    owner = [user for user in users for _ in range(2)]
    return pl.DataFrame(
        {
            "user_id": owner,
            "event_id": [f"{tag}-{user}-{place}" for place, user in enumerate(owner)],
            "item_id": [f"item {place}" for place in range(len(owner))],
            "shown_at": pl.Series(range(len(owner))).cast(TIME),
            "visible_at": pl.Series(range(len(owner))).cast(TIME),
            "actions": pl.Series([1] * len(owner), dtype=pl.Int32),
            "known": pl.Series([1] * len(owner), dtype=pl.Int32),
            "click_at": pl.Series([None] * len(owner), dtype=TIME),
        }
    )


def cut_of(rows: pl.DataFrame, floors: Any) -> Cut:
    """Return heads alone."""
    return Cut(head=rows, head_floors=floors, deep=rows.clear(), deep_floors=floors[:0])


def test_histories_on_s3(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, a later state, a read of a few users by ranges, a purge; a lost data file is named."""
    uri = store.join(bucket, "lake", "history")
    kept = HistoryStore(uri, 1, COLUMNS, 4)
    users = [f"u{number:03}" for number in range(200)]
    kept.write_base(1, 1, 0, cut_of(rows_of(users, "old"), np.full(200, NEVER)))
    base = kept.snapshot(1, 1, 0)
    assert base is not None
    kept.advance(base, 2, 2, cut_of(rows_of(["u007", "x"], "new"), np.full(2, NEVER)))

    monkeypatch.setattr(history_file, "_NEAR", 16)
    snapshot = HistoryStore(uri, 1, COLUMNS, 4).snapshot(5, 5, 0)
    assert snapshot is not None
    found = snapshot.read(pl.Series(["u007", "u199", "x", "nobody", "u100"])).rows

    assert set(found["event_id"]) == {
        *(f"new-{user}-{place}" for place, user in enumerate(["u007", "u007", "x", "x"])),
        *("old-u199-398", "old-u199-399", "old-u100-200", "old-u100-201"),
    }
    sizes = {name: sum(one.size for one in store.listing(uri) if one.name.endswith(name)) for name in ("data", "index")}
    assert snapshot.bytes_read < sizes["index"] + sizes["data"] / 20
    assert kept.purge(["u007"], 1) == 2
    assert not any(b"u007" in store.read_bytes(one.uri) for one in store.listing(uri))

    for one in store.listing(uri):
        if one.name.endswith(".data"):
            store.remove(one.uri)
    left = kept.snapshot(5, 5, 1)
    assert left is not None
    with pytest.raises(FormatError, match="missing"):
        left.read(pl.Series(["u100"]))
