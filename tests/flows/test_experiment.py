"""`daybreak nightly --experiment`: the command, its flow and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.lake.journal import Journal

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("default"),  # a whole night runs MLflow, pandas and SQLAlchemy
]
DAY = str(tiny.FIRST_DAY)


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; returns exit status and the one object."""
    capsys.readouterr()
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_an_experiment_before_its_night_and_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It runs, is shown beside nothing but itself, says so when asked again, and keeps its name for its settings."""
    words = ("--config", str(tiny.make(tmp_path, days=1)), "--home", str(tmp_path / "home"))
    asked = ("nightly", "--date", DAY, "--experiment", "wide", "--set", "model.width=32", *words)

    status, value = ask(capsys, *asked)

    assert status == 0
    assert (value["experiment"], value["gate"], value["state"], value["version"]) == ("wide", "none", "completed", 1)
    assert value["reasons"] == ["model.width 16 -> 32"]
    assert value["supervised_events"] > 0
    entries = Journal(str(tmp_path / "home" / "lake" / "journal")).entries()
    assert ask(capsys, *asked) == (0, value)
    told = ask(capsys, "status", *words)[1]
    assert told["champion"] is None
    assert [one["experiment"] for one in told["nights"]] == ["wide"]
    status, error = ask(capsys, *asked[:-5], "model.width=8", *words)
    assert status == 2
    assert "model.width 32 -> 8" in error["error"]["message"]
    for wrong in (("--next", "1"), ("--force", "train"), ("--experiment", "no/name")):
        assert ask(capsys, *asked, *wrong)[0] == 2
    assert Journal(str(tmp_path / "home" / "lake" / "journal")).entries() == entries
