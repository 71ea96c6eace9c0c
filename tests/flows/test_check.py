"""The `check` command: one object, exit status 2 when not ok, and no home."""

from __future__ import annotations

import json
from datetime import date as Date
from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.lake.journal import Journal
from gr_core.lake.lock import night_lock
from gr_core.refs import day_end_us

DAY = str(tiny.FIRST_DAY)


def words(config: Path, home: Path, *more: str) -> list[str]:
    return ["check", "--config", str(config), "--home", str(home), *more]


def test_check_prints_one_object_and_makes_no_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 for a good day, 2 for a bad one; the object has the four keys of example 7."""
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"

    assert main(words(config, home, "--date", DAY, "--json")) == 0
    value = json.loads(capsys.readouterr().out)
    assert {"ok", "findings", "would_run", "gate_power"} <= value.keys()
    assert value["gate_power"].keys() == {
        "nights",
        "users",
        "standard_error",
        "promoted_if_equal",
        "promoted_if_worse",
    }
    assert main(words(config, home, "--date", "2025-07-01", "--json")) == 2
    value = json.loads(capsys.readouterr().out)
    assert not value["ok"]
    assert "day 2025-07-01 is missing" in value["findings"][0]["message"]
    assert not home.exists()


def test_a_person_reads_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns, sample, findings and the power; the logs go elsewhere."""
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"

    assert main(words(config, home, "--date", DAY)) == 0
    shown = capsys.readouterr().out
    for text in ("user_id", "***", "603", f"{DAY}: ok; a night would run: ingest, sequences", "gate: "):
        assert text in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) > 150, "a pipe has no width: nothing is cut, and no finding is wrapped"
    assert "…" not in shown
    assert sum("info: with " in line and "would reach 80%" in line for line in lines) <= 1


def test_the_embedded_world_is_checked_without_a_home(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next day is made in a scratch folder; files are named where they will be."""
    monkeypatch.chdir(root)
    small = ["--set", "source.world.num_users=60", "--set", "source.world.num_items=40"]

    assert main(words(Path("conf/world.toml"), tmp_path / "home", *small, "--json")) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["date"] == "2025-06-01"
    assert value["sample"][0]["rows"] > 0
    assert any(found["where"].startswith(f"{tmp_path}/home/raw/impressions/") for found in value["findings"])
    assert not (tmp_path / "home").exists()


def test_a_night_that_would_be_refused_for_its_bound_is_not_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The champion's data end after the day: `nightly` refuses it, and `check` says the same before."""
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"
    journal, later = Journal(str(home / "lake" / "journal")), "2025-06-05"
    resolved = load_config(config).resolved()
    pins = {"date": later, "mode": "nightly", "parent": None, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
    journal.append("opened", later, {**pins, "config": resolved}, at_us=1)
    watermark = {"commit": 1, "cutoff_us": day_end_us(Date.fromisoformat(later), "UTC")}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    made = {"version": 1, "date": later, "checkpoint": str(checkpoint), "vocabulary": "v", "watermark": watermark}
    journal.append("registered", later, {**made, "config": resolved}, at_us=1)
    decided = {"decision": "promote", "reasons": ["r"], "version": 1, "previous": None}
    journal.append("decided", later, decided, at_us=1)
    journal.append("finished", later, {"state": "completed", "bound": None, "status": {}}, at_us=1)

    assert main(words(config, home, "--date", DAY, "--json")) == 2
    value = json.loads(capsys.readouterr().out)
    assert "a bound never moves back" in value["findings"][0]["message"]
    assert value["would_run"] == []


def test_a_night_that_runs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one runs, another of its day would run nothing, and one of another day waits."""
    config, home = tiny.make(tmp_path, days=2), tmp_path / "home"
    other = str(tiny.FIRST_DAY + timedelta(days=1))

    with night_lock(str(home), DAY):
        assert main(words(config, home, "--date", DAY, "--json")) == 0
        same = json.loads(capsys.readouterr().out)
        assert main(words(config, home, "--date", other, "--json")) == 0
        later = json.loads(capsys.readouterr().out)

    assert same["would_run"] == []
    assert f"night {DAY} is running" in str(same["findings"])
    assert later["would_run"][0] == "ingest"
    assert f"a night of {other} waits until it is done" in str(later["findings"])
