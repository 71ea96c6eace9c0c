"""`daybreak forget` and `daybreak retract`: one object, what a person reads, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.lake.lock import night_lock
from tests.plain import run as run_stages

DAY = str(tiny.FIRST_DAY)


@pytest.fixture
def home(tmp_path: Path) -> tuple[str, ...]:
    """Return the words that name a home with one ingested day of a tiny feed."""
    config = tiny.make(tmp_path, days=1)
    run_stages(config, tmp_path / "home", tiny.FIRST_DAY, stop_after="ingest")
    return ("--config", str(config), "--home", str(tmp_path / "home"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; returns exit status and the one object."""
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_forget_prints_the_object_of_example_7(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """user, rows and still_held_by; the second time no row."""
    status, value = run(capsys, "forget", "7", *home)

    assert status == 0
    assert list(value) == ["user", "rows", "still_held_by"]
    assert value["user"] == "7"
    assert value["rows"]["events"] > 0
    assert all(list(one) == ["what", "until"] for one in value["still_held_by"])
    assert run(capsys, "forget", "7", *home)[1]["rows"] == {"events": 0, "sequences": 0, "packs": 0}


def test_retract_prints_the_object_of_example_7(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """Date or commit as asked, reason, rows, tainted, next_parent."""
    status, value = run(capsys, "retract", "--commit", "1", "--reason", "bots", *home)

    assert status == 0
    assert value == {"commit": 1, "reason": "bots", "rows": tiny.ROWS_A_DAY, "tainted": [], "next_parent": None}
    status, value = run(capsys, "retract", "--date", DAY, "--reason", "bots", *home)
    assert status == 2
    assert value["error"]["message"].startswith("nothing to retract")


def test_a_person_reads_what_was_done(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """Without --json a few lines, and never the user's id in the logs."""
    assert main(["forget", "7", *home]) == 0
    out = capsys.readouterr().out
    assert "removed: events " in out
    assert "raw files below" in out
    assert main(["retract", "--date", DAY, "--reason", "bots", *home]) == 0
    out = capsys.readouterr().out
    assert f"retracted the ingestion of {DAY}" in out
    assert "starts from no parent, as a first night" in out


@pytest.mark.parametrize(
    "words",
    [
        ("retract", "--date", DAY),
        ("retract", "--reason", "r"),
        ("retract", "--date", "2024-01-01", "--reason", "r"),
        ("retract", "--commit", "9", "--reason", "r"),
        ("retract", "--commit", "0", "--reason", "r"),
        ("forget",),
        ("forget", ""),
    ],
    ids=" ".join,
)
def test_bad_usage_ends_with_2(
    capsys: pytest.CaptureFixture[str], home: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """One error object that says what is wrong."""
    status, value = run(capsys, *words, *home)

    assert status == 2
    assert list(value) == ["error"]


def test_both_end_with_2_while_a_night_runs(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """The message names the night."""
    with night_lock(home[-1], DAY):
        for words in (("forget", "7"), ("retract", "--date", DAY, "--reason", "r")):
            status, value = run(capsys, *words, *home)
            assert status == 2
            assert DAY in value["error"]["message"]
