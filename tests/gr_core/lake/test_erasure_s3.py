"""Forget and retract on S3: the same as on disk."""

from __future__ import annotations

import io

import polars as pl

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
