"""Evaluation beside training in the stages of a night: what it finds, what the gate reuses, what its failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import TrainingError
from gr_core.eval import metrics, scoring, watching
from gr_core.lake.journal import Journal
from gr_core.night import Night
from gr_core.report.status import build_status
from gr_core.stages import evaluating, gating, judging, training
from tests.beside import train_here, train_patiently
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
SAVING = ("train.save_every_steps=4", "train.keep_checkpoints=9", "evaluation.niceness=0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Night, dict[str, Any]]:
    """Run one night whose training waits for the evaluator; returns its home, the night and every stage's result."""
    folder = tmp_path_factory.mktemp("beside")
    with pytest.MonkeyPatch.context() as patch:
        train_patiently(patch)
        night, done = run(tiny.make(folder, days=1), folder / "home", DAY, *SAVING)
    return folder / "home", night, done


def test_checkpoints_are_scored_before_training_ends(whole: tuple[Path, Night, dict[str, Any]]) -> None:
    """Every checkpoint of the running training has a score from before its end, the final one from after it."""
    _, _, done = whole
    checkpoints = done["train"]["checkpoints"]

    *early, final = checkpoints
    assert len(early) >= 2
    assert [one["step"] for one in checkpoints] == [*range(4, 4 * len(early) + 1, 4), done["train"]["step"]]
    assert all(one["scored_during_training"] and one["before_end_seconds"] > 0 for one in early)
    assert not any(one["final"] for one in early)
    assert final["final"]
    assert not final["scored_during_training"]
    assert done["train"]["evaluation_trouble"] is None


def test_status_shows_the_checkpoints_and_their_metrics(whole: tuple[Path, Night, dict[str, Any]]) -> None:
    """`daybreak status` has them as an added key, with the holdout's metrics by action, and no finding."""
    home, _, done = whole

    value = build_status(Journal(str(home / "lake" / "journal")).entries(), today=DAY)

    shown = value["nights"][0]["checkpoints"]
    assert shown == done["train"]["checkpoints"]
    assert set(shown[0]["holdout"]) == {"click", "like"}
    assert shown[-1]["holdout"]["click"].keys() == {"auc", "ne", "calibration", "count", "positives"}
    assert shown[-1]["holdout"]["click"]["count"] == done["gate"]["holdout"]["click"]["count"] > 0
    assert value["findings"] == []


def test_the_challenger_is_the_last_checkpoint_whatever_scored_best(whole: tuple[Path, Night, dict[str, Any]]) -> None:
    """What is registered and judged is the end of training: its metrics are the last checkpoint's."""
    _, _, done = whole

    final = done["train"]["checkpoints"][-1]

    assert final["step"] == done["train"]["step"] == max(one["step"] for one in done["train"]["checkpoints"])
    assert {key: done["gate"]["holdout"]["click"][key] for key in final["holdout"]["click"]} == final["holdout"][
        "click"
    ]


def test_mlflow_has_a_series_of_every_metric(whole: tuple[Path, Night, dict[str, Any]]) -> None:
    """The evaluate run holds holdout/<metric>/<action> at each checkpoint's step."""
    from mlflow.tracking import MlflowClient

    home, _, done = whole
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (child,) = (found for found in client.search_runs(experiments) if found.info.run_name == "evaluate")

    history = client.get_metric_history(child.info.run_id, "holdout/ne/click")

    expected = {one["step"]: one["holdout"]["click"]["ne"] for one in done["train"]["checkpoints"]}
    assert {point.step: point.value for point in history} == pytest.approx(expected)


def test_the_logits_are_gone_once_the_gate_has_spoken(whole: tuple[Path, Night, dict[str, Any]]) -> None:
    """They were kept for the gate alone; what was found stands in the manifest."""
    _, _, done = whole

    assert done["train"]["scores"].endswith(".scores")
    assert not Path(done["train"]["scores"]).exists()


def test_the_gate_uses_the_scores_from_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final checkpoint is not scored twice; the scores used are those that the gate would have made itself."""
    train_here(monkeypatch)
    night, done = run(tiny.make(tmp_path, days=1), tmp_path / "home", DAY, *SAVING, stop_after="evaluate")
    rest = (night, done["train"], done["pack"]["holdout"], done["vocabulary"])
    calls: list[str] = []
    real = scoring.score_pack

    def counted(checkpoint: Path, *arguments: Any, **named: Any) -> scoring.Scored:
        calls.append(str(checkpoint))
        return real(checkpoint, *arguments, **named)

    monkeypatch.setattr(scoring, "score_pack", counted)
    reused = gating.score_challenger(*rest)
    assert calls == []

    own = judging.score(night, done["train"]["uri"], done["pack"]["holdout"], done["vocabulary"])
    assert np.allclose(reused.logits, own.logits, atol=1e-6)
    for name in ("labels", "label_known", "time"):
        assert (getattr(reused, name) == getattr(own, name)).all()
    assert (reused.events, reused.actions, reused.digest) == (own.events, own.actions, own.digest)
    calls.clear()
    other = {**done["train"], "digest": "sha256:another"}
    gating.score_challenger(night, other, done["pack"]["holdout"], done["vocabulary"])
    gating.score_challenger(
        night, done["train"], done["pack"]["next_day"] | {"uri": done["pack"]["train"]["uri"]}, rest[3]
    )
    assert len(calls) == 2


@pytest.mark.parametrize("fault", ["crash", "no start", "hang"])
def test_a_failing_evaluator_never_fails_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """It dies, cannot be started, or does not answer: the night trains on, the gate scores, status has a warning."""
    program = tmp_path / "python"
    words = {"crash": "echo out of memory >&2; exit 3", "hang": "sleep 600", "no start": ""}[fault]
    if words:
        program.write_text(f"#!/bin/sh\n{words}\n")
        program.chmod(0o755)
    monkeypatch.setattr(evaluating.sys, "executable", str(program))
    train_here(monkeypatch)

    night, done = run(
        tiny.make(tmp_path, days=1), tmp_path / "home", DAY, *SAVING, "evaluation.wait_seconds=1", stop_after="evaluate"
    )

    told = {
        "crash": "status 3; the last line of its log: out of memory",
        "hang": "in 1 s",
        "no start": "not be started",
    }
    assert told[fault] in done["train"]["evaluation_trouble"]
    assert (done["train"]["checkpoints"], done["train"]["scores"]) == ([], None)
    scored = gating.score_challenger(night, done["train"], done["pack"]["holdout"], done["vocabulary"])
    assert (
        metrics.evaluate(scored.labels, scored.label_known, scored.logits, ["click", "like"], 3)["click"]["count"] > 0
    )


def test_trouble_is_a_warning_in_status() -> None:
    """The newest night's trouble is a finding; an older one's is not."""
    from gr_core.lake.entries import Entry

    pins = {"mode": "nightly", "parent": None, "cutoff_us": 1, "fingerprint": "f", "seed": 0}
    days = ("2025-06-01", "2025-06-02")
    rows: list[Entry] = []
    for day in days:
        status = {"evaluation_trouble": f"trouble of {day}"}
        payload = {"state": "completed", "bound": None, "status": status}
        rows.append(Entry(seq=len(rows) + 1, at_us=1, kind="opened", night=day, payload={**pins, "date": day}))
        rows.append(Entry(seq=len(rows) + 1, at_us=2, kind="finished", night=day, payload=payload))

    (found,) = build_status(rows, today=DAY)["findings"]

    assert (found["level"], found["where"]) == ("warning", "2025-06-02 evaluation")
    assert "trouble of 2025-06-02" in found["message"]


@pytest.mark.parametrize(
    "override", ["evaluation.parallel=false", "train.save_every_steps=0"], ids=["switched off", "no checkpoints"]
)
def test_without_it_nothing_is_started_and_nothing_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    """Switched off, or nothing to score on the way: no process, no key, and RUN.json names no holdout pack."""
    train_here(monkeypatch)
    _, done = run(tiny.make(tmp_path, days=1), tmp_path / "home", DAY, *SAVING, override, stop_after="train")

    assert not {"checkpoints", "scores"} & done["train"].keys()
    night = tmp_path / "home" / "nights" / str(DAY)
    assert not (night / "evaluation.log").exists()
    assert watching.read_lines(Path(done["train"]["uri"])) == []


def test_a_failed_training_takes_the_evaluator_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is training's own, and no process is left behind."""
    children: list[Any] = []
    real = evaluating.Evaluator.__enter__

    def enter(self: evaluating.Evaluator) -> evaluating.Evaluator:
        children.append(real(self)._child)
        return self

    def fails(*_: Any, **__: Any) -> None:
        raise TrainingError("loss is nan")

    monkeypatch.setattr(evaluating.Evaluator, "__enter__", enter)
    monkeypatch.setattr(training, "run_training", fails)

    with pytest.raises(TrainingError, match="loss is nan"):
        run(tiny.make(tmp_path, days=1), tmp_path / "home", DAY, *SAVING, stop_after="train")

    assert [child.returncode for child in children] == [-9]


def test_the_settings_are_checked(tmp_path: Path) -> None:
    """A niceness that no process can have is refused by name."""
    with pytest.raises(Exception, match=r"evaluation\.niceness"):
        load_config(tiny.make(tmp_path, days=0), ["evaluation.niceness=20"])
