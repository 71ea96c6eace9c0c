"""The `prune` command: one object with --json, a table for a person, exit status 2 for what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.night import open_night


def test_an_open_night_is_kept_and_the_reason_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A home of one open night has nothing to prune."""
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    night = open_night(load_config(config), str(home), tiny.FIRST_DAY, at_us=1)
    words = ["prune", "--config", str(config), "--home", str(home)]

    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    why = f"nightly {night.key} is open; may be repeated (lake.rerun_days 7)"
    assert told == {"dry_run": False, "removed": [], "kept": [{"what": f"night {night.key}", "why": why}]}

    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert why in shown
    assert "nothing to prune" in shown


def test_what_cannot_be_asked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At least one version stays; no home is made."""
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"

    assert main(["prune", "--config", str(config), "--home", str(home), "--keep", "0", "--json"]) == 2

    assert json.loads(capsys.readouterr().out)["error"]["where"] == "keep"
    assert not home.exists()
