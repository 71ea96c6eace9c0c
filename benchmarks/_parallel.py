"""Evaluation beside training: what it adds to training's wall time, and how early its scores are there."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks._report import Figure, Report
from gr_core.data.population import WorldValues
from gr_core.data.ready_packs import write_packs
from gr_core.eval.watching import read_results, results_file
from gr_core.stages.evaluating import Evaluator
from gr_core.stages.training import run_training
from gr_core.train.run import read_run
from gr_core.train.state import read_state

MAX_SLOWDOWN = 1.05
"""With a core each (on a device 1.02)."""
NUM_CHECKPOINTS = 5


def measure_parallel(
    report: Report, work: Path, world: WorldValues, *, num_users: int = 20_000, pairs: int = 5, device: str = "cpu"
) -> None:
    """Add the wall time of a training on the embedded world with an evaluator beside it over that without one.

    Both save NUM_CHECKPOINTS checkpoints on the way, use one thread for training and one for the evaluator, and take
    turns at going first. Medians of the pairs' ratios.

    Args:
        report: Gets parallel/*.
        work: A folder for packs and checkpoints.
        world: Of the users.
        num_users: Of the train pack; the holdout pack has a tenth.
        pairs: How many.
        device: Where training runs; the evaluator is on the CPU.
    """
    folder = work / "parallel"
    indexes = write_packs(folder, world, num_users=num_users, token_budget=1024)
    steps = sum(weight > 0 for weight in indexes["train"]["batch_weights"]["token"])
    found = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        found.append(
            {beside: _train(folder, max(steps // NUM_CHECKPOINTS, 1), device, beside=beside) for beside in order}
        )
    rows = [one[True]["checkpoints"] for one in found]
    early = [row["before_end_seconds"] for found_of in rows for row in found_of if row["scored_during_training"]]
    for name, unit in (("wall_seconds", "s, the process"), ("train_seconds", "s, the loop")):
        ratio = statistics.median(one[True][name] / one[False][name] for one in found)
        report.figures[f"parallel/slowdown/{name}"] = Figure(
            value=ratio, unit=f"times alone ({unit})", at_most=MAX_SLOWDOWN if name == "wall_seconds" else None
        )
    report.figures |= {
        "parallel/scored_during_training": Figure(
            value=statistics.median(sum(row["scored_during_training"] for row in found_of) for found_of in rows),
            unit=f"of {NUM_CHECKPOINTS} checkpoints",
            at_least=1,
        ),
        "parallel/seconds_a_checkpoint": Figure(
            value=statistics.median(row["seconds"] for found_of in rows for row in found_of), unit="s"
        ),
        "parallel/earliest_score_before_end": Figure(value=max(early, default=None), unit="s before training's end"),
    }
    report.conditions["parallel"] = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "steps": steps,
        "holdout_targets": indexes["holdout"]["num_supervised"],
        "pairs": [
            {str(beside): {k: v for k, v in run.items() if k != "checkpoints"} for beside, run in one.items()}
            for one in found
        ],
    }
    shutil.rmtree(folder)


def _train(folder: Path, every: int, device: str, *, beside: bool) -> dict[str, Any]:
    """Train once; returns wall seconds of the process and the loop, and what was scored."""
    values = json.loads((folder / "RUN.json").read_text(encoding="utf-8"))
    values["config"]["train"] = {"num_threads": 1, "save_every_steps": every}
    values |= {"output": "trained", "resume": False, "device": device, "evaluation": {"num_threads": 1, "niceness": 10}}
    path = folder / "TRAIN.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    output = read_run(path).output
    with Evaluator(path, output, wait_seconds=600, afresh=True, wanted=beside) as evaluator:
        began = time.perf_counter()
        run_training(path, evaluator.beside(None))
        seconds = time.perf_counter() - began
        evaluator.finish()
    found = read_results(output)
    state = read_state(output)
    results_file(output).unlink(missing_ok=True)
    shutil.rmtree(output)
    return {
        "wall_seconds": seconds,
        "train_seconds": state["metrics"]["perf/train_seconds"],
        "digest": state["digest"],
        "trouble": found["trouble"],
        "checkpoints": found["checkpoints"],
    }
