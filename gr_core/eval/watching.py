"""Evaluation beside training: each new checkpoint of a running training, scored on the holdout pack.

In: the RUN.json of the training, with `packs.holdout`. Out: one JSON object a line, on stdout and in
<output>.scored.jsonl, and the final checkpoint's logits in <output>.scores. Training neither knows of this process nor
waits for it, and what it finds chooses nothing: the challenger is always the last checkpoint.

    {"event": "started"}             of this process; earlier lines are another attempt's
    {"event": "ready", "at"}         imports and first passes are done
    {"event": "scored", "at", "step", "final", "digest", "seconds", "scored_during_training", "holdout"}
    {"event": "failed", "at", "step", "final", "message"}
    {"event": "training_ended", "at"}

`at` is in seconds since the start of this process, `seconds` is what one scoring took, `holdout` is
{action: `metrics.binary_metrics`}, `step` counts along the lineage as the checkpoint's state does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gr_core.data.batches import PackReader
from gr_core.errors import FormatError, UsageError
from gr_core.eval import metrics, scores
from gr_core.eval.scoring import Scorer, warm_up
from gr_core.model.execution import Execution
from gr_core.train.distributed import device_of
from gr_core.train.run import Run, read_run
from gr_core.train.state import read_state, step_checkpoints

logger = logging.getLogger(__name__)
Say = Callable[[dict[str, Any]], None]

POLL_SECONDS = 0.1
_REMOVAL_SECONDS = 1.0  # a directory goes file by file
_METRICS = ("auc", "ne", "calibration", "count", "positives")


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """What is watched, and what it is scored on."""

    run: Run
    """The training."""
    holdout: Path
    """The pack."""
    num_threads: int = 1
    """CPU threads."""
    device: torch.device | str = "cpu"
    """Where checkpoints are scored."""


def read_watch(path: Path) -> Watch:
    """Read RUN.json: as for training, with `packs.holdout`; `evaluation` may have num_threads (1) and device (cpu).

    Raises:
        UsageError: No holdout pack is named; or as `read_run`.
    """
    run = read_run(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    holdout = values["packs"].get("holdout")
    if holdout is None:
        raise UsageError(
            f"RUN file {path} names no packs.holdout, so there is nothing to score on; add it", where=str(path)
        )
    settings = values.get("evaluation") or {}
    return Watch(
        run=run,
        holdout=path.parent / holdout,
        num_threads=int(settings.get("num_threads", 1)),
        device=device_of(settings.get("device", "cpu")),
    )


def is_finished(run: Run) -> bool:
    """Tell whether a training's final checkpoint is there."""
    try:
        return bool(read_state(run.output)["fingerprint"] == run.fingerprint)
    except FormatError:
        return False


def scores_folder(output: Path) -> Path:
    """Return where the final checkpoint's logits are kept: beside it, since a checkpoint is its own files alone."""
    return output.with_name(f"{output.name}.scores")


def results_file(output: Path) -> Path:
    """Return the file of result lines of a training's checkpoints."""
    return output.with_name(f"{output.name}.scored.jsonl")


class Watcher:
    """Scores checkpoints as they come, each once, the newest first: an old one may go at any moment.

    Args:
        watch: What is watched.
        say: Called with each result object.
    """

    def __init__(self, watch: Watch, say: Say) -> None:
        self._watch = watch
        self._say = say
        # compiled as training is, yet in full precision: the gate takes the final checkpoint's scores
        self._execution = Execution(compile=watch.run.train.compile)
        self._began = time.monotonic()
        # an earlier attempt's scores stand
        told = [line for line in read_lines(watch.run.output) if line["event"] == "scored" and not line["final"]]
        self._seen: set[str] = {line["digest"] for line in told}

    def warm_up(self) -> None:
        """Import and run all that scoring needs, so that the first checkpoint does not wait for it."""
        run = self._watch.run
        torch.set_num_threads(self._watch.num_threads)
        warm_up(PackReader(self._watch.holdout), run.model, run.tables, self._watch.device, self._execution)
        self._tell("ready")

    def follow(self, is_over: Callable[[float], bool]) -> bool:
        """Score what comes until training is over, then the final checkpoint.

        Args:
            is_over: Tells whether training has ended; waits up to so many seconds for it.

        Returns:
            Whether the final checkpoint was scored.
        """
        while not is_over(0.0):
            new = self._newest()
            if new is None:
                is_over(POLL_SECONDS)
            else:
                self._score(new, is_over)
        self._tell("training_ended")
        return self._score(self._watch.run.output, is_over, final=True)

    def _newest(self) -> Path | None:
        """Return the newest complete checkpoint of this training that was not looked at yet."""
        return next((path for path in reversed(step_checkpoints(self._watch.run.output)) if self._is_new(path)), None)

    def _is_new(self, path: Path) -> bool:
        try:
            state = read_state(path)
        except FormatError:
            return False
        return bool(state["fingerprint"] == self._watch.run.fingerprint and state["digest"] not in self._seen)

    def _score(self, path: Path, is_over: Callable[[float], bool], *, final: bool = False) -> bool:
        began = time.monotonic()
        step: int | None = None
        try:
            state = read_state(path)
            step, digest = state["step"], str(state["digest"])
            self._seen.add(digest)
            watch = self._watch
            scorer = Scorer(path, num_threads=watch.num_threads, device=watch.device, execution=self._execution)
            scored = scorer.score(watch.holdout)
            if final:
                scores.keep(scores_folder(self._watch.run.output), scored, digest)
            found = metrics.evaluate(
                scored.labels, scored.label_known, scored.logits, state["actions"], state["supervised_mask"]
            )
        except Exception as error:
            if not final and _goes(path):
                logger.info("%s was removed before it was scored: evaluation is slower than training saves", path)
                return False
            logger.exception("%s was not scored", path)
            self._tell("failed", step=step, final=final, message=f"{path.name}: {type(error).__name__}: {error}")
            return False
        self._tell(
            "scored",
            step=step,
            final=final,
            digest=digest,
            seconds=round(time.monotonic() - began, 3),
            scored_during_training=not final and not is_over(0.0),
            holdout={action: {key: values[key] for key in _METRICS} for action, values in found.items()},
        )
        return True

    def _tell(self, event: str, **values: Any) -> None:
        self._say({"event": event, "at": round(time.monotonic() - self._began, 3), **values})


def _goes(path: Path) -> bool:
    """Tell whether a checkpoint is being removed, since a newer one, or the final one, is there."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_REMOVAL_SECONDS / 100)
    return True


def open_results(output: Path, *, afresh: bool = False) -> Say:
    """Return a function that appends a result line; an earlier attempt's lines stay unless `afresh`.

    A line that a killed process left torn is ended, so that the next one is whole.
    """
    path = results_file(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if afresh:
        path.unlink(missing_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"

    def say(line: dict[str, Any]) -> None:
        nonlocal torn
        with path.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if torn else "") + json.dumps(line) + "\n")
        torn = False

    return say


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Return the whole result lines of a training; none where nothing watched it."""
    try:
        text = results_file(output).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "event" in value:
            lines.append(value)
    return lines


def read_results(output: Path) -> dict[str, Any]:
    """Return what was found of a training's checkpoints, by step; of a checkpoint scored twice, the last word.

    Returns:
        `checkpoints`: [{step, final, scored_during_training, seconds, before_end_seconds, holdout}], where
        before_end_seconds tells how long before training's end the score was there (negative: after it; None: that
        attempt of the training never ended). `trouble`: what went wrong in the last attempt, or None.
    """
    attempts: list[list[dict[str, Any]]] = [[]]
    for line in read_lines(output):
        if line["event"] == "started":
            attempts.append([])
        attempts[-1].append(line)
    checkpoints: dict[int, dict[str, Any]] = {}
    for attempt in attempts:
        ended = next((line["at"] for line in attempt if line["event"] == "training_ended"), None)
        for line in attempt:
            if line["event"] == "scored":
                one = {key: line[key] for key in ("step", "final", "scored_during_training", "seconds")}
                one["before_end_seconds"] = None if ended is None else round(ended - line["at"], 3)
                checkpoints[line["step"]] = {**one, "holdout": line["holdout"]}
    trouble = [line["message"] for line in attempts[-1] if line["event"] in ("failed", "trouble")]
    return {
        "checkpoints": [checkpoints[step] for step in sorted(checkpoints)],
        "trouble": "; ".join(trouble) or None,
    }
