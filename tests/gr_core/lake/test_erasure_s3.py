"""Forget and retract on S3: the same as on disk."""

from __future__ import annotations

import io
from typing import Any

import polars as pl
import pytest

from gr_core.errors import StoreUnavailable
from gr_core.hashing import bucket_of
from gr_core.lake import leftovers, nightfiles, remote, store, tombstones
from gr_core.lake.events import EventTable, erasure
from gr_core.lake.events.retraction import Asked, Ingestion, TakeBack
from tests.events import batch, event, make_config
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

USER, BUCKETS = "person-7f3a", 4


def holders(uri: str) -> list[str]:
    """Return the objects below a URI that hold the user: in a column, in their bytes, or in their name."""
    found = []
    for one in remote.listing(uri):
        content = store.read_bytes(one.uri)
        text = repr(pl.read_parquet(io.BytesIO(content)).to_dicts()) if one.name.endswith(".parquet") else repr(content)
        found += [one.name] if USER in text or USER in one.name else []
    return found


def test_a_user_leaves_and_a_commit_is_taken_back(bucket: str) -> None:
    """Old files and the log forget him, reads hide him from the tombstone on, and a commit's rows go."""
    config, lake = make_config(), f"{bucket}/home/lake"
    events = EventTable(f"{lake}/events", config)
    for number in (1, 2):
        rows = [event(f"own-{number}", USER), event(f"other-{number}", "u")]
        events.ingest(f"2025-06-0{number}", batch(config, *rows), parent=None)
    with store.directory(f"{bucket}/home/nights/2025-06-01/packs/train") as folder:
        (folder / "index.json").write_text(f'{{"segment_users": ["{USER}", "u", "{USER}"]}}')
    store.write_json(
        f"{bucket}/home/nights/2025-06-01/manifests/pack-train.json",
        {"fingerprint": "f", "result": {"uri": f"{bucket}/home/nights/2025-06-01/packs/train"}},
    )
    assert len(holders(bucket)) > 3

    tombstones.add(lake, USER, BUCKETS, at_us=1, versions=[])
    assert events.read(events.delta_version())["user_id"].to_list() == ["u", "u"]
    assert erasure.forget_rows(events.at, events.uri, USER, BUCKETS) == 2
    assert leftovers.clean(config, lake, USER) == 0
    assert nightfiles.forget(f"{bucket}/home", USER, 0) == {"sequences": 0, "packs": 2}
    assert erasure.forget_files(events.at, events.uri, USER, BUCKETS) == 2

    assert holders(bucket) == []
    assert remote.listing(f"{bucket}/home/nights") == []
    whole = tuple(Ingestion.of(one) for one in events.commits() if one.number == 2)
    told = TakeBack(
        events.at,
        events.uri,
        Asked(numbers=frozenset([2]), whole=whole),
        keep=lambda _bucket, _rows: "",
        trained=lambda rows: rows["user_id"] == "u",
    ).run("poison")
    assert told is not None
    assert told.rows == 1
    assert events.read(events.delta_version())["event_id"].to_list() == ["other-1"]


def test_a_store_that_breaks_off_is_not_taken_for_a_file_that_is_gone(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old file that cannot be asked about stays, and what a changed row was before is not given up."""
    events = EventTable(f"{bucket}/home/lake/events", make_config())
    events.ingest("2025-06-01", batch(events.config, event("a", known=0)), parent=None)
    old = next(one.uri for one in remote.listing(events.uri) if one.name.endswith(".parquet"))
    events.ingest("2025-06-02", batch(events.config, event("a", actions=1)), parent=None)
    number = bucket_of("u", BUCKETS)
    stranger = next(user for user in map(str, range(99)) if bucket_of(user, BUCKETS) == number)
    taking = TakeBack(
        events.at,
        events.uri,
        Asked(numbers=frozenset([2]), whole=(Ingestion.of(events.commits()[-1]),)),
        keep=lambda _bucket, _rows: "",
        trained=lambda rows: rows["user_id"] == "u",
    )
    real = pl.scan_parquet

    def breaking(uri: str, **named: Any) -> pl.LazyFrame:
        if old in uri:
            raise OSError("object-store error: Generic S3 error: Error performing GET: connection closed")
        return real(uri, **named)

    monkeypatch.setattr(pl, "scan_parquet", breaking)

    with pytest.raises(StoreUnavailable, match="did not answer"):
        erasure.forget_files(events.at, events.uri, stranger, BUCKETS)
    assert store.exists(old)
    with pytest.raises(StoreUnavailable, match="did not answer"):
        taking.run("poison")
