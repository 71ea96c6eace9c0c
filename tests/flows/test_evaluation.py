"""Evaluation beside training through the real flow: what `daybreak status` and the Prefect UI show of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import tests.tiny as tiny
from flows.cli import main
from flows.nightly import nightly
from tests.beside import train_patiently

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings(
        "default"
    ),  # a whole night runs MLflow, pandas and SQLAlchemy, with deprecations of theirs
]


def test_status_shows_a_checkpoint_that_was_scored_before_training_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One night with checkpoints on the way: status has their scores, for people too, and Prefect an artifact.

    The evaluation of the parent did not wait for training, either.
    """
    from prefect.client.orchestration import get_client

    train_patiently(monkeypatch)
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"
    saving = ["train.save_every_steps=4", "evaluation.niceness=0"]

    began = datetime.now(UTC)
    ran = nightly(config=str(config), date=tiny.FIRST_DAY, home=str(home), overrides=saving)

    assert isinstance(ran, dict)
    assert main(["status", "--config", str(config), "--home", str(home), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["nights"][0]
    assert shown == ran
    assert sum(one["scored_during_training"] for one in shown["checkpoints"]) >= 1
    assert main(["status", "--config", str(config), "--home", str(home)]) == 0
    assert "before training ended; NE click" in " ".join(capsys.readouterr().out.split())
    with get_client(sync_client=True) as client:
        artifacts = [one for one in client.read_artifacts() if one.key == "checkpoints"]
        runs = [run for run in client.read_task_runs() if run.start_time and run.start_time > began]
    times = {run.name: (run.start_time, run.end_time) for run in runs}
    assert times["evaluate parent"][1] < times["train"][1]
    ne = str(shown["checkpoints"][0]["holdout"]["click"]["ne"])
    assert any(ne in str(artifact.data) for artifact in artifacts)
