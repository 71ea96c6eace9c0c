"""The benchmark that records what grouping costs on a feed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from benchmarks import grouping as benchmark
from benchmarks._layouts import BASE
from gr_core import grouping
from gr_core.config import load_config


def test_the_difference_and_its_interval_are_recorded_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed by seed grouped less random; with it the config is warned no more."""
    asked: dict[str, Any] = {}

    def compare(config: Any, home: str, first: Any, **more: Any) -> dict[str, dict[int, float]]:
        asked.update(more, grouping=config.pack.grouping, home=home)
        return {BASE: {0: 0.70, 1: 0.71}, "packed/bucketed": {0: 0.69, 1: 0.71}}

    monkeypatch.setattr(benchmark, "compare", compare)
    path, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    words = ["--config", str(path), "--home", str(home), "--first", "2025-06-01", "--seeds", "2", "--json"]

    assert benchmark.main([*words, "--set", "pack.grouping=bucketed"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert said["figures"]["grouping/packed/bucketed/auc_difference"]["value"] == pytest.approx(-0.005)
    assert (asked["arms"], asked["grouping"], asked["nights"]) == ((BASE, "packed/bucketed"), "none", 5)
    assert str(home) not in asked["home"]
    config = load_config(path, ["pack.grouping=bucketed"])
    found = grouping.comparison(config, str(home))
    assert found is not None
    assert found["auc"]["click"]["difference"] == pytest.approx(-0.005)
    assert found["auc"]["click"]["low"] < -0.005 < found["auc"]["click"]["high"]
    assert grouping.warning(config, str(home)) is None


@pytest.mark.parametrize("words", [[], ["--set", "pack.grouping=sorted", "--seeds", "1"]], ids=["none", "one seed"])
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Random batches with themselves, or one training a side: exit 2, nothing is written."""
    path, home = tiny.make(tmp_path, days=0), tmp_path / "home"

    assert benchmark.main(["--config", str(path), "--home", str(home), "--first", "2025-06-01", *words]) == 2
    assert "pack.grouping" in capsys.readouterr().err
    assert not home.exists()
