"""Upkeep after a night: what it keeps, and that it never fails one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from gr_core.config import load_config
from gr_core.errors import StoreUnavailable
from gr_core.lake.events import EventTable, upkeep
from gr_core.lake.journal import Entry
from gr_core.night import Night, open_night
from gr_core.stages import ingesting, tidying
from tests import tiny


def entry(seq: int, kind: str, night: str, **payload: Any) -> Entry:
    """Return a journal entry of a night."""
    return Entry(seq=seq, kind=kind, night=night, at_us=seq, payload=payload)


def ingested(path: Path, days: int) -> Night:
    """Ingest so many days of the tiny feed, and return the last night."""
    config = load_config(tiny.make(path, days=days))
    for number in range(days):
        day = tiny.FIRST_DAY.fromordinal(tiny.FIRST_DAY.toordinal() + number)
        night = open_night(config, str(path / "home"), day, at_us=number)
        ingesting.ingest(night)
    return night


def test_versions_of_nights_that_may_be_read_again_are_kept() -> None:
    """Unfinished nights at any age, finished ones of the last rerun_days; a night that read nothing needs nothing."""
    entries = []
    for place, (day, finished) in enumerate([("01", False), ("02", True), ("08", True), ("09", True), ("10", False)]):
        date = f"2025-06-{day}"
        opened = {"date": date, "mode": "nightly", "parent": None, "cutoff_us": 0, "seed": 0, "fingerprint": ""}
        entries.append(entry(3 * place + 1, "opened", date, **opened))
        if day != "10":
            entries.append(entry(3 * place + 2, "ingested", date, commit=place + 1, delta_version=place + 10))
        if finished:
            entries.append(entry(3 * place + 3, "finished", date, state="completed", bound=None, status={}))

    assert tidying.kept_versions(entries, rerun_days=1) == [10, 12, 13]
    assert tidying.kept_versions(entries, rerun_days=30) == [10, 11, 12, 13]
    assert tidying.kept_versions([], rerun_days=1) == []


def test_a_finished_run_of_nights_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the night's own config and journal; the versions that nights read stay readable."""
    monkeypatch.setattr(upkeep, "RUN", 4)
    monkeypatch.setattr(upkeep, "LAG", 0)
    night = ingested(tmp_path, 4)
    before = len(DeltaTable(night.table_uri).file_uris())
    done = tidying.tidy(night)

    assert (done["runs"], done["files"], done["deleted_files"]) == (1, before, 0)
    assert len(DeltaTable(night.table_uri).file_uris()) == 2
    table = EventTable(night.table_uri, night.settings)
    assert [table.read(commit.delta_version).height for commit in table.commits()] == [600, 1200, 1800, 2400]


def test_upkeep_never_fails_a_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is told, and left to the next night."""
    night = ingested(tmp_path, 1)

    def silent(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("the store did not answer", where="here")

    monkeypatch.setattr(EventTable, "maintain", silent)
    assert tidying.tidy(night) == {"error": "StoreUnavailable"}
