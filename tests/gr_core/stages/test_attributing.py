"""Where training's time goes, on the newest finished night's pack: what is measured, from what, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.errors import TrainingError, UsageError
from gr_core.lake.journal import Journal, nights
from gr_core.stages import attributing
from gr_core.train.attribution import PARTS
from tests.erased import FIRST, SECOND, conclude, snapshot
from tests.plain import run

TRAINS_IN_A_CHILD = True


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a config and a home after a finished night and one that stopped half-way."""
    folder = tmp_path_factory.mktemp("world")
    config = tiny.make(folder, days=0)
    for day in (FIRST, SECOND):
        tiny.write_day(folder / "raw", day, rows=200)
    conclude(config, folder / "home", FIRST, 1)
    run(config, folder / "home", SECOND, stop_after="vocabulary")
    return config, folder / "home"


def test_attribute_prints_example_7s_object_and_changes_nothing(
    world: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The newest finished night's pack, this config's settings; with --baseline the naive ones beside it."""
    config, home = world
    before = snapshot(home)
    words = ["attribute", "--config", str(config), "--home", str(home), "--steps", "3", "--baseline"]

    assert main([*words, "--trace", str(tmp_path / "trace.json"), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert snapshot(home) == before
    assert found.keys() == {"steps", "seconds", "perf", "advice", "baseline"}
    for side in (found, found["baseline"]):
        assert side["steps"] == 3
        assert side["seconds"].keys() == set(PARTS)
        assert side["perf"]["perf/tokens_per_second"] > 0
        assert side["advice"]
    assert found["baseline"].keys() == found.keys() - {"baseline"}
    assert found["baseline"]["perf"]["perf/padding_fraction"] > found["perf"]["perf/padding_fraction"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_naive_settings_are_all_switched_off(world: tuple[Path, Path]) -> None:
    """Every switch that this release has stands on its other side; nothing else of the config changes."""
    settings = load_config(world[0])
    was, now = settings.resolved(), attributing.naive(settings).resolved()

    assert (now["train"]["metrics"], now["pack"]["layout"]) == ("naive", "padded")
    changed = {key for key in was["train"] if was["train"][key] != now["train"][key]}
    assert changed <= attributing.NAIVE_TRAIN.keys()
    assert {key: value for key, value in now.items() if key not in ("train", "pack")} == {
        key: value for key, value in was.items() if key not in ("train", "pack")
    }


def test_a_home_without_a_trained_night_is_refused(world: tuple[Path, Path], tmp_path: Path) -> None:
    """No night at all, or one that is not finished: the error says what to run first."""
    config = load_config(world[0])
    with pytest.raises(UsageError, match="run `daybreak nightly` first"):
        attributing.attribute(config, str(tmp_path / "none"))
    run(world[0], tmp_path / "half", FIRST, stop_after="vocabulary")

    with pytest.raises(UsageError, match="run `daybreak nightly` first"):
        attributing.attribute(config, str(tmp_path / "half"))
    with pytest.raises(UsageError, match="--steps"):
        attributing.attribute(config, str(world[1]), steps=0)


def test_a_pack_that_is_gone_is_named(world: tuple[Path, Path], tmp_path: Path) -> None:
    """A forgotten user's packs are removed: the error names the pack and the way on."""
    config, home = world
    shutil.copytree(home, tmp_path / "home")
    damaged = tmp_path / "home" / "nights" / str(FIRST) / "manifests" / "pack-train.json"
    values: dict[str, Any] = json.loads(damaged.read_text())
    values["result"]["uri"] = str(tmp_path / "gone")
    damaged.write_text(json.dumps(values))

    with pytest.raises(UsageError, match="gone or damaged"):
        attributing.attribute(load_config(config), str(tmp_path / "home"))


@pytest.mark.parametrize(
    "other", [{"mode": "full_retrain"}, {"experiment": "faster"}], ids=["full retrain", "experiment"]
)
def test_what_is_beside_nights_is_passed_over(world: tuple[Path, Path], tmp_path: Path, other: dict[str, str]) -> None:
    """A full retrain or an experiment that finished later has no pack of its own night: the newest night's is measured."""
    shutil.copytree(world[1], tmp_path / "home")
    journal = Journal(str(tmp_path / "home" / "lake" / "journal"))
    key, opened = f"{FIRST}+other", nights(journal.entries())[str(FIRST)].opened
    journal.append("opened", key, {**opened, **other}, at_us=2)
    made = {"version": 2, "checkpoint": "c", "watermark": {"commit": 1, "cutoff_us": 1}}
    journal.append("registered", key, made, at_us=2)
    journal.append("finished", key, {"state": "completed", "bound": None, "status": {}}, at_us=2)
    assert nights(journal.entries())[key].is_finished

    assert attributing.newest_trained(load_config(world[0]), str(tmp_path / "home")).key == str(FIRST)


def test_the_childs_words_come_through(world: tuple[Path, Path]) -> None:
    """Features that the pack does not have: training's own error, exit 1, not a line of a log."""
    with pytest.raises(TrainingError, match="pack again with this config"):
        attributing.attribute(load_config(world[0], ["model.context_features=[]", "vocabulary={}"]), str(world[1]))
