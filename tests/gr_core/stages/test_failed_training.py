"""A night whose training meets a number that is none (case F4), and the night after it."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.errors import TrainingError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.stages import training
from gr_core.train import loop
from gr_core.train.run import read_run
from gr_core.train.series import read_series
from tests.beside import train_here
from tests.erased import conclude
from tests.gr_core.train.test_distributed import processes_of
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(3)]
SAVING = ("train.save_every_steps=1", "evaluation.parallel=false")
INFINITE = "train.action_weights.click=1e39"  # a number, but none in fp32
TRAINS_IN_A_CHILD = True


def test_f4_the_night_after_starts_from_the_champion_and_covers_both_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed night leaves no version and no checkpoint; the next one has its parent, and its events too (case F4)."""
    train_here(monkeypatch)
    config = tiny.make(tmp_path)
    home = tmp_path / "home"
    first = conclude(config, home, DAYS[0], 1)
    with pytest.raises(TrainingError, match=r"loss is not finite at step \d+, batch \d+ of .*last good checkpoint is"):
        run(config, home, DAYS[1], INFINITE, stop_after="train")

    entries = Journal(str(home / "lake" / "journal")).entries()
    chosen = champion(entries)
    assert chosen is not None
    assert (chosen.version, chosen.checkpoint) == (1, first["train"]["uri"])
    assert list((home / "nights" / str(DAYS[1])).glob("checkpoint-*/manifest.json")) == []
    assert not nights(entries)[str(DAYS[1])].is_finished

    night, third = run(config, home, DAYS[2], stop_after="train")

    assert night.parent is not None
    assert night.parent.version == 1
    due = sum(part["counts"]["due"] for part in third["sequences"])
    assert due > 1.5 * tiny.ROWS_A_DAY  # one day has no more than ROWS_A_DAY
    assert third["train"]["step"] > first["train"]["step"]


def test_a_killed_training_is_taken_up_by_the_stage(tmp_path: Path) -> None:
    """Its child killed, the stage's next attempt goes on from a step checkpoint to the uninterrupted digest (case F3).

    What it held, a GPU's memory too, is held by a process of its own, which has ended when the stage has (case A9).
    """
    config = tiny.make(tmp_path, days=1)
    night, done = run(config, tmp_path / "home", DAYS[0], *SAVING, stop_after="pack")

    children: list[int] = []

    def kill(line: dict[str, Any]) -> None:
        if line["step"] > 4:
            children.extend(processes_of(tmp_path / "home" / "nights" / night.key / "RUN.json"))
            raise KeyboardInterrupt  # the stage kills its child on any error of its own

    with pytest.raises(KeyboardInterrupt):
        training.train(night, done["pack"], done["vocabulary"], kill)
    folder = tmp_path / "home" / "nights" / night.key
    assert len(children) == 1
    assert os.getpid() not in children
    assert processes_of(folder / "RUN.json") == []
    assert list(folder.glob("checkpoint-*/manifest.json")) == []

    steps: list[int] = []
    trained = training.train(night, done["pack"], done["vocabulary"], lambda line: steps.append(line["step"]))

    assert steps[0] > 1
    assert "going on from" in (folder / "train.log").read_text()
    assert list(folder.glob("*.steps")) == []
    whole = replace(read_run(folder / "RUN.json"), output=tmp_path / "whole")
    assert trained["digest"] == loop.train(whole, lambda line: None)["digest"]


def test_f8_every_steps_rates_are_in_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The train run of MLflow has loss, gradient norm and learning rates by step, as the checkpoint's series (case F8)."""
    from mlflow import MlflowClient

    train_here(monkeypatch)
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    _, done = run(config, home, DAYS[0], stop_after="register")
    series = read_series(Path(done["train"]["uri"]))
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (child,) = [one for one in client.search_runs(experiments) if one.info.run_name == "train"]

    for name in ("loss", "gradient_norm", "dense_learning_rate", "sparse_learning_rate"):
        points = client.get_metric_history(child.info.run_id, f"train/step/{name}")
        assert {point.step: point.value for point in points} == dict(zip(series["step"], series[name], strict=True))
    assert len(series["step"]) > 1
