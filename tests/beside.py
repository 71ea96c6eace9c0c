"""Trainings, and scores of registered models, in the test's own process, which saves the start of a child.

One of the trainings waits for the evaluator beside it. In a night training never waits. Here it does, so that a test knows what was scored before it ended; the evaluator is the
real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gr_core.eval.watching import read_lines
from gr_core.registry import fresh
from gr_core.registry.base import DATA
from gr_core.registry.scorer import RequestScorer
from gr_core.stages import training
from gr_core.train import loop
from gr_core.train.run import read_run
from gr_core.train.saving import StepSaver
from gr_core.train.state import step_checkpoints

SECONDS = 120


def train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every training of this test run in this process, at its own pace."""

    def run_training(
        run: Path, progress: Callable[[dict[str, Any]], None] | None, *, timeout_seconds: float | None = None
    ) -> None:
        del timeout_seconds
        loop.train(read_run(run), progress or (lambda _: None))

    monkeypatch.setattr(training, "run_training", run_training)


def score_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gate load the registered model in this process, with this checkout's code."""

    def run_process(model: Path, pack: Path, vocabulary: Path, out: Path, *, limit_seconds: float) -> None:
        del limit_seconds
        RequestScorer(model / "data" / DATA).write_scores(str(pack), str(vocabulary), str(out))

    monkeypatch.setattr(fresh, "run_process", run_process)


def train_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every training of this test wait, after each of its checkpoints, until that was scored."""
    real = StepSaver.after_step

    def after_step(self: StepSaver, night: Any, *arguments: Any) -> None:
        real(self, night, *arguments)
        self.wait()
        output = night.run.output
        wanted = {int(path.name.removeprefix("step-")) for path in step_checkpoints(output)}
        deadline = time.monotonic() + SECONDS
        while not wanted <= (scored := {line.get("step") for line in read_lines(output)}):
            assert time.monotonic() < deadline, f"of steps {wanted}, scored are {scored}"
            time.sleep(0.02)

    train_here(monkeypatch)
    monkeypatch.setattr(StepSaver, "after_step", after_step)
