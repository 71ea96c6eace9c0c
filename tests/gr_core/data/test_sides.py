"""Side tables: joined by key, as of the newest complete snapshot."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from tests.feeds import make_config, ms, read, rows, write


def test_side_features_join_by_key(tmp_path: Path) -> None:
    """Text keys meet integer keys; no row means null and is counted, or quarantined where the table says so."""
    write(tmp_path, rows({"item": 5}, {"item": 6}))
    pl.DataFrame({"vid": ["5", "5", None], "tag": ["b,c", "a,z", "q"]}).write_parquet(tmp_path / "items.parquet")
    table = {
        "name": "items",
        "path": "items.parquet",
        "on": {"item_id": "vid"},
        "side": {"tag": "split_part(tag, ',', 1)", "long": "CASE WHEN tag = 'a,z' THEN 1 ELSE 0 END"},
    }
    batch = read(make_config(tmp_path, tables=[table]))
    strict = read(make_config(tmp_path, tables=[{**table, "missing": "quarantine"}]))

    assert batch.events.sort("event_id").select("tag", "long").rows() == [("a", "1"), (None, None)]
    assert batch.missing_side == {"items": 1}
    assert strict.reasons == {"missing_items": 1}
    assert strict.missing_side == {"items": 0}


def test_snapshots_join_as_of_shown_at(tmp_path: Path) -> None:
    """An event sees the newest snapshot complete before its lake day began, never one of its own day."""
    moments = [datetime(2025, 5, day, 23, tzinfo=UTC) for day in (28, 29, 30, 31)]
    write(tmp_path, rows(*({"ts": ms(moment)} for moment in moments)))
    (tmp_path / "items").mkdir()
    for name in ("2025-05-28", "2025-05-30"):
        pl.DataFrame({"vid": [7], "tag": [name]}).write_parquet(tmp_path / "items" / f"{name}.parquet")
    table = {"name": "items", "path": "items/{date}.parquet", "on": {"item_id": "vid"}, "side": {"tag": "tag"}}
    batch = read(make_config(tmp_path, tables=[table]))

    assert batch.events.sort("event_id")["tag"].to_list() == [None, "2025-05-28", "2025-05-28", "2025-05-30"]
    assert batch.missing_side == {"items": 1}
