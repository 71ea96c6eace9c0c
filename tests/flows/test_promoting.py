"""`daybreak promote`, `daybreak rollback` and `daybreak compare`: one object, what a person reads, exit statuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.lake.journal import Journal
from gr_core.lake.lock import night_lock
from tests.erased import REGISTRY, Registry, interrupt

DAY = str(tiny.FIRST_DAY)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the words that name a home whose journal has a champion, version 1, and a held version 2; no MLflow."""
    monkeypatch.setattr(REGISTRY, Registry)
    config = tiny.make(tmp_path, days=0)
    words = ("--config", str(config), "--home", str(tmp_path / "home"))
    journal = Journal(str(tmp_path / "home" / "lake" / "journal"))
    for version, decision in ((1, "promote"), (2, "hold")):
        checkpoint = tmp_path / f"checkpoint-{version}"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").write_text("{}")
        day = f"2025-06-0{version}"
        journal.append("opened", day, opened(config, day, version), at_us=1)
        watermark = {"commit": version, "cutoff_us": version}
        made = {"version": version, "checkpoint": str(checkpoint), "watermark": watermark, "date": day}
        journal.append("registered", day, made, at_us=1)
        decided = {"decision": decision, "reasons": ["r"], "version": version, "previous": None}
        journal.append("decided", day, decided, at_us=1)
        journal.append("finished", day, {"state": "completed", "bound": None, "status": {}}, at_us=1)
    return words


def opened(config: Path, day: str, number: int) -> dict[str, Any]:
    """Return an opening entry's payload."""
    resolved = load_config(config).resolved()
    told = {
        "key": day,
        "home": "",
        "at_us": 1,
        "date": day,
        "mode": "nightly",
        "parent": None,
        "cutoff_us": number,
        "seed": 0,
    }
    return {**told, "fingerprint": "f", "config": resolved}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; returns exit status and the one object."""
    capsys.readouterr()
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_both_print_the_object_of_example_7(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """Champion and previous; a held version may be promoted, and status says by whom and why."""
    assert run(capsys, "promote", "2", "--reason", "the gate lacked data", *home) == (
        0,
        {"champion": 2, "previous": 1},
    )
    value = run(capsys, "status", *home)[1]
    assert value["champion"]["version"] == 2
    assert value["nights"][1]["reasons"] == ["r", "promoted by an operator: the gate lacked data"]
    assert run(capsys, "rollback", "--reason", "clicks fell", *home) == (0, {"champion": 1, "previous": None})
    assert run(capsys, "promote", "2", "--reason", "again", *home)[0] == 0
    assert run(capsys, "rollback", "--to", "1", "--reason", "no", *home) == (0, {"champion": 1, "previous": None})
    assert Registry.aliases == {"champion": 1, "previous": None, "challenger": 2}


def test_a_person_reads_what_the_next_night_does(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """Without --json one line."""
    capsys.readouterr()
    assert main(["promote", "2", "--reason", "r", *home]) == 0
    assert capsys.readouterr().out == (
        "champion: version 2; the next night starts from it; rollback goes to version 1\n"
    )
    assert main(["rollback", "--reason", "r", *home]) == 0
    assert capsys.readouterr().out == (
        "champion: version 1; the next night starts from it; there is none before it to roll back to\n"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("promote", "2"), "--reason"),
        (("rollback",), "--reason"),
        (("promote", "--reason", "r"), "VERSION"),
        (("promote", "2", "--reason", " "), "needs a reason"),
        (("promote", "champion", "--reason", "r"), "'champion'"),
        (("promote", "0", "--reason", "r"), "'0'"),
        (("promote", "9", "--reason", "r"), "version 9 is no registered version"),
        (("promote", "1", "--reason", "r"), "version 1 is the champion already"),
        (("rollback", "--reason", "r"), "none before it"),
        (("rollback", "--to", "2", "--reason", "r"), "none before it"),
        (("compare", "1"), "B"),
        (("compare", "1", "1"), "got 1 twice"),
        (("compare", "1", "9"), "version 9 is no registered version"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_usage_ends_with_2(
    capsys: pytest.CaptureFixture[str], home: tuple[str, ...], words: tuple[str, ...], named: str
) -> None:
    """One error object that says what is wrong."""
    status, value = run(capsys, *words, *home)

    assert status == 2
    assert list(value) == ["error"]
    assert named in value["error"]["message"]


def test_both_end_with_2_while_a_night_runs(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """The message names the night."""
    with night_lock(home[-1], DAY):
        status, value = run(capsys, "promote", "2", "--reason", "r", *home)
    assert status == 2
    assert DAY in value["error"]["message"]


def test_compare_prints_the_object_of_example_7(capsys: pytest.CaptureFixture[str], home: tuple[str, ...]) -> None:
    """The keys are all there, also of versions whose nights' files are gone; and a person gets tables."""
    status, value = run(capsys, "compare", "1", "2", *home)

    assert status == 0
    assert (value["a"], value["b"], value["slices"], value["config"]) == (1, 2, [], {})
    assert list(value) == ["a", "b", "metrics", "slices", "config", "data"]
    assert (value["data"]["a"]["commit"], value["data"]["b"]["commit"]) == (1, 2)
    assert main(["compare", "1", "2", *home]) == 0
    assert "no night's holdout could be scored by both versions" in capsys.readouterr().out


def test_compare_says_what_it_does_on_stderr(
    capsys: pytest.CaptureFixture[str], home: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads and scores; the one object alone is on stdout."""

    def compare(*_: Any, tell: Callable[[str], None]) -> dict[str, Any]:
        tell("version 2 scores them")
        return {"a": 1}

    monkeypatch.setattr("gr_core.stages.comparing.compare", compare)
    assert main(["compare", "1", "2", *home, "--json"]) == 0

    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": 1}
    assert "version 2 scores them\n" in said.err


def test_the_next_start_of_a_night_sets_the_aliases_that_a_kill_left(
    capsys: pytest.CaptureFixture[str], home: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the journal's entry, a promotion stands; also a start of a night that is finished repairs them."""
    from flows.nightly import run_night

    Registry.aliases = {"champion": 1, "previous": None, "challenger": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "repair", interrupt)
        assert run(capsys, "promote", "2", "--reason", "r", *home)[0] == 1
    assert Registry.aliases["champion"] == 1
    assert run(capsys, "status", *home)[1]["champion"]["version"] == 2

    night: Any = run_night(load_config(home[1]), home[3], tiny.FIRST_DAY, parent=None, force=None, mode="nightly")

    assert night["state"] == "completed"
    assert Registry.aliases == {"champion": 2, "previous": 1, "challenger": 2}
