"""`daybreak evaluate` on nights of a tiny feed: what the night measured, measured again; any model; nothing is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gr_core.config import load_config
from gr_core.errors import ConfigError, UsageError
from gr_core.eval.progressive import progressive_keys
from gr_core.lake.journal import Journal
from gr_core.registry.base import InMemoryStore
from gr_core.report.evaluated import metric_rows, render_evaluation, sentence
from gr_core.stages import judging, reevaluating
from tests.erased import FIRST, SECOND, THIRD, entries_of, snapshot
from tests.plain import run

World = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models() -> Iterator[InMemoryStore]:
    """Return the registry that evaluations log to; the two nights have a run there that has ended."""
    found = InMemoryStore()
    for day in (FIRST, SECOND):
        found.start_night(str(day), params={}, tags={})
        found.finish(str(day), "FINISHED")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "model_store", lambda *_: found)
        yield found


@pytest.fixture(scope="module")
def world(poisoned: World, models: InMemoryStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Return a config, a home with two finished nights and one that was killed after training, and its checkpoint."""
    config, home = poisoned[0], tmp_path_factory.mktemp("evaluated") / "home"
    shutil.copytree(poisoned[2], home)
    _, done = run(config, home, THIRD, stop_after="train")
    return config, home, str(done["train"]["uri"])


def evaluate(world: tuple[Path, Path, str], model: object, day: Any = SECOND, *overrides: str) -> dict[str, Any]:
    """Evaluate a model; the object survives JSON, and the home stays as it is."""
    before = snapshot(world[1])
    value = reevaluating.evaluate_model(load_config(world[0], list(overrides)), str(world[1]), str(model), day)
    assert snapshot(world[1]) == before
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    return value


def measured(home: Path, day: Any) -> dict[str, Any]:
    """Return what a night's own evaluation of its parent recorded."""
    manifest = json.loads((home / "nights" / str(day) / "manifests" / "evaluate.json").read_text())
    return dict(manifest["result"])


def test_the_parent_scores_as_in_the_night(world: tuple[Path, Path, str], models: InMemoryStore) -> None:
    """Every figure of the night's progressive validation, and intervals around AUC and NE; logged once (case G14)."""
    night = measured(world[1], SECOND)

    value = evaluate(world, 1)
    again = evaluate(world, 1)

    assert value == again
    assert list(value) == ["model", "version", "date", "metrics", "count", "trained_on"]
    assert (value["model"], value["version"], value["date"], value["trained_on"]) == ("1", 1, str(SECOND), False)
    assert value["count"] == night["new_events"] > 0
    for key, expected in progressive_keys(night).items():
        assert value["metrics"][key] == expected, key
    for key in ("auc", "ne"):
        low, high = (value["metrics"][f"next_day/{key}_{end}/click"] for end in ("low", "high"))
        error = night["next_day_errors"]["click"][key]
        assert low < value["metrics"][f"next_day/{key}/click"] < high
        assert (high - low) / 2 == pytest.approx(1.959964 * error)
    runs = [key for key in models.runs if "evaluate version 1" in key]
    assert runs == [f"{SECOND}/evaluate version 1"]
    logged = models.runs[runs[0]]
    assert (logged.status, logged.parent, logged.tags["trained_on"]) == ("FINISHED", str(SECOND), "False")
    assert logged.metrics == {key: float(v) for key, v in value["metrics"].items() if v is not None}
    assert models.runs[str(SECOND)].metrics == {}


def test_a_model_that_was_trained_on_the_day_says_so(world: tuple[Path, Path, str]) -> None:
    """Its own day is no next day to it: all events are late ones."""
    value = evaluate(world, 2)

    assert value["trained_on"] is True
    assert value["metrics"]["next_day/count/click"] == 0
    assert value["metrics"]["next_day/auc/click"] is None
    assert value["metrics"]["late_events/count/click"] == evaluate(world, 1)["metrics"]["next_day/count/click"]
    assert [row["events"] for row in metric_rows(value) if row["action"] == "click"] == ["next day", "late"]
    assert "TRAINED on some" in sentence(value)


def test_aliases_and_checkpoints_name_models(world: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Aliases are the journal's; a checkpoint is known by its content wherever it lies; one without a version has none."""
    config, home, unregistered = world
    first = next(e.payload["checkpoint"] for e in entries_of(home) if e.kind == "registered")
    shutil.copytree(first, tmp_path / "copy")

    by_number = evaluate(world, 1)
    for name in ("previous", str(tmp_path / "copy")):
        assert evaluate(world, name) == {**by_number, "model": name}
    assert [evaluate(world, name)["version"] for name in ("champion", "challenger")] == [2, 2]
    other = evaluate(world, unregistered)
    assert (other["version"], other["trained_on"]) == (None, True)
    assert other["metrics"]["late_events/auc/click"] > 0
    assert evaluate(world, "champion", None)["date"] == str(SECOND)
    assert load_config(config).name == "tiny"


def test_rows_that_are_gone_are_built_again(world: tuple[Path, Path, str], tmp_path: Path) -> None:
    """From the table's pinned version, by the model's own vocabulary: the same figures to 1e-5."""
    config, home, _ = world
    copy = tmp_path / "home"
    shutil.copytree(home, copy)
    for entry in [e for e in entries_of(home) if e.kind == "opened"]:
        manifests = copy / "nights" / entry.night / "manifests"
        for path in [*manifests.glob("pack-*.json"), *manifests.glob("sequences-*.json")]:
            path.unlink()

    value = evaluate((config, copy, ""), 1)

    kept = evaluate(world, 1)
    assert {key: value[key] for key in ("version", "date", "count", "trained_on")} == {
        key: kept[key] for key in ("version", "date", "count", "trained_on")
    }
    assert value["metrics"] == pytest.approx(kept["metrics"], abs=1e-5)


def test_a_night_without_a_parent_can_be_scored_too(world: tuple[Path, Path, str]) -> None:
    """It scored nothing itself, and has no rows for it: they are built."""
    value = evaluate(world, 1, FIRST)

    assert value["trained_on"] is True
    assert value["count"] == measured_rows(world[1])
    assert value["metrics"]["late_events/auc/click"] > 0.5


def measured_rows(home: Path) -> int:
    """Return how many events the first night committed: all of them were new."""
    rows = next(e.payload["rows"] for e in entries_of(home) if e.kind == "ingested")
    return int(rows["committed"])


@pytest.mark.parametrize(
    ("model", "day", "match"),
    [
        ("9", SECOND, "--model 9 is no registered version; the newest are 1, 2"),
        ("newest", SECOND, "--model newest is neither one of champion, challenger, previous"),
        ("1", THIRD, f"there is none of {THIRD}; the newest are {FIRST}, {SECOND}"),
    ],
    ids=["version", "checkpoint", "night"],
)
def test_what_is_not_there_is_one_error(world: tuple[Path, Path, str], model: str, day: Any, match: str) -> None:
    """Exit status 2, and nothing is logged."""
    with pytest.raises(UsageError, match=match):
        evaluate(world, model, day)
    with pytest.raises(ConfigError, match=r"lake.num_buckets"):
        evaluate(world, "1", SECOND, "lake.num_buckets=4")


def test_an_empty_home_has_no_champion(world: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Nothing is made there."""
    journal = Journal(str(tmp_path / "home" / "lake" / "journal"))
    for name in ("champion", "challenger"):
        with pytest.raises(UsageError, match="there is none yet"):
            reevaluating.find_model(str(tmp_path / "home"), journal.entries(), name)
    with pytest.raises(UsageError, match="there is none yet; run `daybreak nightly` first"):
        reevaluating.evaluate_model(load_config(world[0]), str(tmp_path / "home"), "champion")
    assert not (tmp_path / "home").exists()


def test_a_person_reads_a_table(world: tuple[Path, Path, str]) -> None:
    """Metrics by action, with intervals; what was scored; whether it was trained on."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_evaluation(evaluate(world, "previous")))
    text = capture.get()

    assert "version 1 (previous) on the 2" in text
    assert "trained on none of them" in text
    assert "next day" in text
    assert "[0." in text
