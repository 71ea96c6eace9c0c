"""Upkeep of the event table: few files, no lost row, no lost race, and nothing deleted that a night still reads."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable
from polars.testing import assert_frame_equal

from gr_core.errors import FormatError
from gr_core.lake.events import EventTable, layout, upkeep
from gr_core.lake.events.writing import Writing
from tests.events import CLICK, NOON, batch, event, make_config, table

USERS = [str(number) for number in range(12)]


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs of four commits that wait for one more."""
    monkeypatch.setattr(upkeep, "RUN", 4)
    monkeypatch.setattr(upkeep, "LAG", 1)


def nights(path: Path, number: int, *, late: bool = False) -> EventTable:
    """Return a table of so many nights, one event a user each; some of them of a day long past if `late`."""
    config = make_config()
    events = table(path, config)
    for night in range(number):
        at = NOON + timedelta(days=night)
        rows = [event(f"{user}-{night}", user, shown_at=at, visible_at=at) for user in USERS]
        past = NOON - timedelta(days=9)
        rows += [event(f"late-{night}", "3", shown_at=past, visible_at=past)] * late
        events.ingest(f"n{night}", batch(config, *rows), parent=None)
    return events


def files(path: Path) -> pl.DataFrame:
    """Return the files of the table's newest version."""
    return layout.files_of(DeltaTable(str(path / "lake" / "events")))


def test_complete_runs_become_few_files_and_no_row_changes(tmp_path: Path, small_runs: None) -> None:
    """Two complete runs are compacted, the newest commits wait; a second upkeep finds nothing to do."""
    events = nights(tmp_path, 10, late=True)
    before, pinned = events.read(events.delta_version()), events.delta_version()
    done = events.maintain(keep_versions=[pinned])

    assert (done.runs, done.deleted_files) == (2, 0)
    assert done.files > 8 * files(tmp_path)["bucket"].n_unique()
    assert_frame_equal(events.read(events.delta_version()), before)
    assert_frame_equal(events.read(pinned), before)
    runs = files(tmp_path).filter(pl.col("max.commit") <= 8)
    assert runs.filter(pl.col("min.shown_at") > NOON - timedelta(days=1)).group_by("bucket", "min.commit").len()[
        "len"
    ].unique().to_list() == [1]
    assert runs.filter(pl.col("max.shown_at") < NOON)["rows"].to_list() == [4, 4]
    assert events.maintain(keep_versions=[pinned]) == upkeep.Kept()


def test_compaction_is_no_ingestion(tmp_path: Path, small_runs: None) -> None:
    """It adds no number, marks itself, says that no data changed, and nights are found and made as before."""
    events = nights(tmp_path, 6)
    commits = events.commits()
    events.maintain()
    entry = DeltaTable(str(tmp_path / "lake" / "events")).history(1)[0]
    later = events.ingest("later", batch(make_config(), event("0-0", "0", actions=CLICK)), parent=None)

    assert entry[upkeep.MARK] == "1-4"
    log = (tmp_path / "lake/events/_delta_log" / f"{later.delta_version - 1:020d}.json").read_text()
    assert '"dataChange":true' not in log
    assert events.commits()[:-1] == commits
    assert (later.number, later.updated, later.rows.duplicates) == (7, 1, 1)
    assert events.erasures() == 0


def test_a_lost_race_is_no_loss(tmp_path: Path, small_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that comes in between wins; the compaction leaves no file behind and is done the next time."""
    events, config = nights(tmp_path, 6), make_config()
    commit, raced = Writing.commit, []

    def race(self: Writing, *arguments: object) -> None:
        if not raced:
            raced.append(True)
            table(tmp_path, config).ingest("fast", batch(config, event("0-0", "0", actions=CLICK)), parent=None)
        commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Writing, "commit", race)
    assert events.maintain().runs == 0
    assert len(list((tmp_path / "lake/events").rglob("*.parquet"))) == files(tmp_path).height + 1
    rows = events.read(events.delta_version())
    assert rows.filter(pl.col("updated") == 7)["event_id"].to_list() == ["0-0"]
    assert events.maintain().runs == 1
    assert_frame_equal(events.read(events.delta_version()), rows)


def test_vacuum_keeps_what_nights_may_read(tmp_path: Path, small_runs: None) -> None:
    """Kept versions stay readable, others lose their files, and what a killed writer left goes too."""
    events = nights(tmp_path, 6)
    pinned = events.delta_version()
    before = events.read(pinned)
    folder = next((tmp_path / "lake" / "events").glob("bucket=*"))
    (folder / "left-by-a-kill.parquet").write_bytes(b"half a file")
    kept = events.maintain(keep_versions=[pinned], retention_hours=0)

    assert kept.deleted_files == 1
    assert_frame_equal(events.read(pinned), before)
    assert events.maintain(retention_hours=0).deleted_files == kept.files
    version = events.delta_version()
    assert events.maintain(retention_hours=0) == upkeep.Kept()
    assert events.delta_version() == version
    assert_frame_equal(events.read(events.delta_version()), before)
    with pytest.raises(FormatError, match=r"parquet: it is missing \(a vacuum"):
        events.read(pinned)
