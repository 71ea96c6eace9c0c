"""The sequences stage and the history store behind it: derived, so it may go at any time and changes no digest."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import tests.tiny as tiny
from benchmarks._nights import open_day, promote, run_data, unread_checkpoint
from gr_core.config import load_config
from tests.plain import run


def test_a_night_without_the_history_store_makes_the_same_sequences(tmp_path: Path) -> None:
    """The second night reads histories from the store; with the store gone it reads the table, to equal digests."""
    config, home = tiny.make(tmp_path, days=2), tmp_path / "home"
    night = open_day(load_config(config), str(home), tiny.FIRST_DAY)
    data = run_data(night)
    promote(night, data, {"uri": unread_checkpoint(night), "watermark": data.ingested["bound"], "digest": "d"})
    second = tiny.FIRST_DAY + timedelta(days=1)
    _, first = run(config, home, second, stop_after="sequences")
    shutil.rmtree(home / "lake" / "history")
    for manifest in (home / "nights" / str(second) / "manifests").glob("sequences-*"):
        manifest.unlink()

    _, again = run(config, home, second, stop_after="sequences")

    assert sum(part["users"]["from_store"] for part in first["sequences"]) > 20
    assert all(part["bytes"]["history_read"] > 0 for part in first["sequences"])
    assert [part["users"]["from_store"] for part in again["sequences"]] == [0, 0]
    assert [part["digest"] for part in again["sequences"]] == [part["digest"] for part in first["sequences"]]
    assert [part["counts"] for part in again["sequences"]] == [part["counts"] for part in first["sequences"]]
    assert len(list((home / "lake" / "history").glob("bucket-*/manifest-*"))) == 2
