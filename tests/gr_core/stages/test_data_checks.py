"""Data checks in the night: before the commit, in the gate and in the status."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import DataContractError
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal
from gr_core.report.status import build_status
from tests.plain import run

DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(5)]


def ingested(folder: Path, *thin: int, count: int = 4) -> tuple[Path, Path]:
    """Write five days, some of them of few rows, and ingest the first ones."""
    config, home = tiny.make(folder, days=5), folder / "home"
    for number in thin:
        tiny.write_day(folder / "raw", DAYS[number], rows=60)
    for day in DAYS[:count]:
        run(config, home, day, stop_after="ingest")
    return config, home


def test_a_stop_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    """A day of a tenth of the rows is not committed; with the named override it is, and the finding is told."""
    config, home = ingested(tmp_path, 4)
    table = EventTable(str(home / "lake" / "events"), load_config(config))
    before = table.delta_version()

    with pytest.raises(DataContractError, match="volume: 63 rows read") as got:
        run(config, home, DAYS[4], "source.checks.volume.level=stop", stop_after="ingest")
    assert table.delta_version() == before
    assert table.find(str(DAYS[4])) is None

    override = got.value.message.split("--set ")[-1]
    assert override == "source.checks.volume.level=warn"
    _, done = run(config, home, DAYS[4], override, stop_after="ingest")
    assert [found["check"] for found in done["ingest"]["findings"]] == ["volume"]
    status = build_status(Journal(str(home / "lake" / "journal")).entries(), today=DAYS[4], running=str(DAYS[4]))
    assert [f["where"] for f in status["findings"]] == [f"{DAYS[4]} read"]
    assert "63 rows read" in status["findings"][0]["message"]


def test_figures_of_every_ingestion_are_kept(tmp_path: Path) -> None:
    """The commit's record tells files, raw columns, nulls and unknown bits, and columns that the config does not know."""
    config, home = ingested(tmp_path, count=1)
    commit = EventTable(str(home / "lake" / "events"), load_config(config)).find(str(DAYS[0]))

    assert commit is not None
    assert commit.figures["files"] == 1
    assert commit.figures["columns"]["ts"] == "Int64"
    assert commit.figures["rows"] == commit.rows.read == 603
    assert commit.figures["nulls"] == {"action:click": 0, "action:like": 0, "surface": 0}
    assert commit.unknown_columns == {}


def test_a_held_finding_holds_the_gate(tmp_path: Path) -> None:
    """With level hold the day is committed and trained, and its model is not promoted."""
    config, home = ingested(tmp_path, 3, count=3)
    _, done = run(config, home, DAYS[3], "source.checks.volume.level=hold")

    assert done["ingest"]["rows"]["committed"] > 0
    assert done["gate"]["gate"] == "held"
    assert done["gate"]["reasons"][0] == "gate.data: the night's data checks are not green"
    assert done["gate"]["reasons"][-1].startswith("volume: 63 rows read")
