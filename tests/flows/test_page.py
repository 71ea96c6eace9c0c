"""The `page` command: a path on stdout, one object with --json, exit status 2 for a night that never was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.night import open_night

DAY = str(tiny.FIRST_DAY)


def test_the_page_is_written_and_its_path_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest night's by default; a person reads the path alone."""
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    open_night(load_config(config), str(home), tiny.FIRST_DAY, at_us=1)
    page = home / "nights" / DAY / "page.html"
    words = ["page", "--config", str(config), "--home", str(home)]

    assert main(words) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert f"<title>Night {DAY}</title>" in page.read_text()

    page.unlink()
    assert main([*words, "--date", DAY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"date": DAY, "page": str(page)}
    assert page.exists()


def test_a_night_that_never_was_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with the one error object, and no home is made."""
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    words = ["page", "--config", str(config), "--home", str(home), "--date", DAY, "--json"]

    assert main(words) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["where"]) == ("UsageError", "date")
    assert f"no night {DAY}" in error["message"]
    assert not home.exists()
