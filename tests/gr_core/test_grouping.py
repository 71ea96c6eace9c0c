"""The record of what grouping costs on a feed, and the warning where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core import grouping
from gr_core.config import load_config
from gr_core.errors import FormatError

AUC = {"click": {"difference": -0.001, "low": -0.003, "high": 0.001}}


def test_grouping_without_a_comparison_is_warned_of_until_there_is_one(tmp_path: Path) -> None:
    """Random batches need none; a record counts for its own grouping and its own feed."""
    path, home = tiny.make(tmp_path, days=0), str(tmp_path / "home")
    plain = load_config(path)
    bucketed, by_length = (load_config(path, [f"pack.grouping={kind}"]) for kind in ("bucketed", "sorted"))
    assert grouping.warning(plain, home) is None
    told = grouping.warning(bucketed, home)
    assert told is not None
    assert "python -m benchmarks.grouping --config" in told

    grouping.record(bucketed, home, auc=AUC, seeds=3)
    grouping.record(bucketed, home, auc=AUC, seeds=4)

    assert grouping.warning(bucketed, home) is None
    assert grouping.warning(by_length, home) is not None
    elsewhere = load_config(path, ["pack.grouping=bucketed", "source.root=/another/feed"])
    assert grouping.warning(elsewhere, home) is not None
    found = grouping.comparison(bucketed, home)
    assert found is not None
    assert (found["auc"], found["seeds"]) == (AUC, 4)
    assert len(json.loads((tmp_path / "home" / "grouping.json").read_text())["comparisons"]) == 1


def test_random_batches_are_no_comparison(tmp_path: Path) -> None:
    """Recording `none` against itself is a mistake of the caller."""
    with pytest.raises(ValueError, match="compared with"):
        grouping.record(load_config(tiny.make(tmp_path, days=0)), str(tmp_path), auc=AUC, seeds=3)


@pytest.mark.parametrize("text", ["{", '{"format": 2, "comparisons": []}', "[]"], ids=["damaged", "format", "list"])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    """It is neither taken for a comparison nor written over."""
    config = load_config(tiny.make(tmp_path, days=0), ["pack.grouping=sorted"])
    (tmp_path / "grouping.json").write_text(text)

    with pytest.raises(FormatError, match=r"grouping\.json"):
        grouping.warning(config, str(tmp_path))


def test_check_and_every_command_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` has a finding, which is no error; a command that loads the config says it on stderr; stdout stays one object."""
    config, home = str(tiny.make(tmp_path, days=1)), str(tmp_path / "home")
    words = ["--config", config, "--home", home, "--set", "pack.grouping=bucketed", "--json"]

    assert main(["check", *words, "--date", str(tiny.FIRST_DAY)]) == 0
    checked = capsys.readouterr()
    assert main(["config", "show", *words]) == 0
    shown = capsys.readouterr()

    assert [one["level"] for one in json.loads(checked.out)["findings"] if one["where"] == "pack.grouping"] == [
        "warning"
    ]
    for said in (checked, shown):
        assert "no comparison of its AUC on this feed" in said.err
    assert json.loads(shown.out)["config"]["pack"]["grouping"] == "bucketed"
