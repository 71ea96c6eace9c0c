"""Evaluation beside training: starts `python -m gr_core.eval` with the training child and takes what it found.

Whatever befalls that process, the night goes on: its trouble is a finding, and the gate scores what it did not.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from gr_core.environment import child_variables
from gr_core.errors import FormatError
from gr_core.eval import scores
from gr_core.eval.__main__ import ENDED
from gr_core.eval.scoring import Scored
from gr_core.eval.watching import open_results, read_lines, read_results, scores_folder
from gr_core.lake import store
from gr_core.night import Night

logger = logging.getLogger(__name__)
Progress = Callable[[dict[str, Any]], None]


def is_wanted(night: Night, packs: dict[str, Any]) -> bool:
    """Tell whether a night's checkpoints are scored beside training: there are some, and something to score them on."""
    config = night.settings
    asked = config.evaluation.parallel and config.train.save_every_steps > 0
    return asked and packs["holdout"]["num_supervised"] > 0 and not night.finished


class Evaluator:
    """The process beside one training; used as a context manager, after which it is gone.

    Its stdin is a pipe that closes with this process, also after kill -9, and it takes that as its end, as the training
    child does: no orphan scores beside the next attempt.

    Args:
        run: RUN.json; the process's log lies beside it.
        output: Where the training's final checkpoint goes.
        wait_seconds: How long the final score is waited for.
        afresh: Forget what earlier attempts found.
        wanted: False: start nothing, say nothing.
    """

    def __init__(self, run: Path, output: Path, *, wait_seconds: float, afresh: bool, wanted: bool = True) -> None:
        self._run, self._output, self._wait_seconds, self._wanted = run, output, wait_seconds, wanted
        self._say = open_results(output, afresh=afresh)
        self._told = len(read_lines(output))
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if not self._wanted:
            return self
        command = [sys.executable, "-m", "gr_core.eval", str(self._run), "--exit-with-stdin"]
        try:
            with self._run.with_name("evaluation.log").open("w") as log:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    text=True,
                    env=child_variables(),
                )
        except OSError as error:
            self._trouble(f"could not be started: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdin is not None:
                with contextlib.suppress(OSError):  # the last word, which a dead child never read
                    self._child.stdin.close()

    def beside(self, progress: Progress | None) -> Progress:
        """Return a taker of training's progress lines that also logs what was scored since the one before."""

        def take(line: dict[str, Any]) -> None:
            self._log()
            if progress is not None:
                progress(line)

        return take

    def finish(self) -> None:
        """Say that training has ended, and wait for the final checkpoint's score."""
        child = self._child
        if child is None or child.stdin is None:
            return
        try:
            child.stdin.write(ENDED + "\n")
            child.stdin.flush()
            status = child.wait(self._wait_seconds)
        except OSError:
            status = child.wait()
        except subprocess.TimeoutExpired:
            self._trouble(f"did not score the final checkpoint in {self._wait_seconds:g} s (evaluation.wait_seconds)")
            return
        self._log()
        if status != 0 and not any(line["event"] == "failed" and line["final"] for line in read_lines(self._output)):
            last = self._run.with_name("evaluation.log").read_text(errors="replace").strip().rpartition("\n")[2]
            self._trouble(f"ended with status {status}; the last line of its log: {last}")

    def _trouble(self, message: str) -> None:
        logger.warning("evaluation beside training %s; the night goes on without", message)
        with contextlib.suppress(OSError):
            self._say({"event": "trouble", "message": message})

    def _log(self) -> None:
        lines = read_lines(self._output)
        for line in lines[self._told :]:
            if line["event"] == "scored":
                found = {action: values["ne"] for action, values in line["holdout"].items() if values["ne"] is not None}
                shown = ", ".join(f"{action} {value:.4f}" for action, value in found.items())
                words = "the model's step %d scored on the holdout in %.1f s: NE %s"  # of all nights, unlike training's
                logger.info(words, line["step"], line["seconds"], shown)
        self._told = len(lines)


def beside_training(night: Night, packs: dict[str, Any], run: Path, output: Path) -> Evaluator:
    """Return the evaluator of a night's training, to be entered around it; it starts nothing where nothing is wanted.

    Args:
        night: The night.
        packs: Role to PackRef.
        run: RUN.json, which is written when the evaluator is entered.
        output: Where the final checkpoint goes.
    """
    seconds, afresh = night.settings.evaluation.wait_seconds, night.force == "train"
    return Evaluator(run, output, wait_seconds=seconds, afresh=afresh, wanted=is_wanted(night, packs))


def collect(output: Path, folder: str) -> dict[str, Any]:
    """Return what was found of a training's checkpoints, and put the final one's logits where the gate finds them.

    Args:
        output: The training's local output.
        folder: URI of the checkpoint.

    Returns:
        checkpoints and evaluation_trouble (`watching.read_results`), and scores, the URI of the logits or None. Empty
        where nothing watched the training.
    """
    if not read_lines(output):
        return {}
    found = read_results(output)
    logits, uri = scores_folder(output) / scores.LOGITS_FILE, f"{folder}.scores"
    if logits.exists() and not store.is_local(folder):
        with store.directory(uri) as made:
            shutil.copyfile(logits, made / logits.name)
    return {
        "checkpoints": found["checkpoints"],
        "evaluation_trouble": found["trouble"],
        "scores": uri if logits.exists() else None,
    }


def kept_scores(trained: dict[str, Any], pack: dict[str, Any]) -> Scored | None:
    """Return the challenger's scores from beside training; None where there are none of this checkpoint and pack."""
    if not trained.get("scores"):
        return None
    try:
        folder, rows = store.local_copy(trained["scores"]), store.local_copy(pack["uri"])
        return scores.kept(folder, rows, trained["digest"])
    except (FileNotFoundError, FormatError) as error:
        logger.warning("the challenger is scored again, its scores cannot be read: %s", error)
        return None


def discard_scores(trained: dict[str, Any]) -> None:
    """Remove the logits that `kept_scores` returned: the decision is made."""
    if trained.get("scores"):
        store.remove_tree(trained["scores"])
