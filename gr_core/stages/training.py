"""The training stage: a child process on local packs, and nothing else; its checkpoint is uploaded afterwards."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gr_core.environment import child_variables, state_directory
from gr_core.errors import FormatError, TrainingError
from gr_core.hashing import short
from gr_core.lake import store
from gr_core.night import Night, run_stage, stage_fingerprint
from gr_core.refs import Bound, CheckpointRef
from gr_core.stages import children, evaluating
from gr_core.train import launch
from gr_core.train.advice import with_evaluation
from gr_core.train.settings import UNDECIDING
from gr_core.train.state import read_state, verify

logger = logging.getLogger(__name__)


def train(
    night: Night, packs: dict[str, Any], words: dict[str, Any], progress: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Train the challenger in a child process, warm-started from the parent's checkpoint.

    Args:
        night: The night.
        packs: Role to PackRef.
        words: The grown vocabulary.
        progress: Called with each progress line of the child.

    Returns:
        The CheckpointRef as JSON, `metrics`, `newest_supervised_us`, `attention` (the kernel that ran), and what evaluation
        beside training found (`evaluating.collect`).

    Raises:
        TrainingError: The child stopped; its own words.
        StoreUnavailable: The object store did not answer. A finished checkpoint waits in the home's local state: the
            next attempt uploads it without training again.
    """
    config = night.settings
    identity = {
        "pack": packs["train"]["digest"],
        "vocabulary": words["version"],
        "parent": night.parent.checkpoint if night.parent else None,
        "model": config.resolved()["model"],
        "train": {key: value for key, value in config.resolved()["train"].items() if key not in UNDECIDING},
        **({"attention": config.attention.path} if config.attention.path != "auto" else {}),
        "seed": night.seed,
    }
    wanted = stage_fingerprint("train", identity)
    # Named by what made it: another config's training never overwrites a checkpoint that may be registered by now.
    folder = night.uri("train", f"checkpoint-{short(wanted)}")

    def work() -> dict[str, Any]:
        place = workplace(night)
        output = store.local_path(folder) if store.is_local(folder) else place / folder.rpartition("/")[2]
        resumes = not store.is_local(folder) and night.force != "train"
        if not (resumes and _is_finished(folder, wanted)):
            if resumes and _is_finished(str(output), wanted):
                logger.info("checkpoint %s is trained, its upload broke off; going on with that", output)
            else:
                place.mkdir(parents=True, exist_ok=True)
                run = place / "RUN.json"
                store.write_json(str(run), run_file(night, packs, words, output, wanted))
                with evaluating.beside_training(night, packs, run, output) as evaluator:
                    limit = config.nightly.stage_timeout_seconds
                    run_training(run, evaluator.beside(progress), timeout_seconds=limit)
                    evaluator.finish()
                for steps in output.parent.glob("*.steps"):  # of trainings that were given up for another config
                    shutil.rmtree(steps, ignore_errors=True)
            if not store.is_local(folder):
                store.upload(output, folder)
        state = store.read_json(store.join(folder, "state.json"))
        bound = Bound.from_json(state["watermark"])
        ref = CheckpointRef(uri=folder, digest=state["digest"], step=state["step"], watermark=bound)
        return {
            **ref.to_json(),
            "metrics": state["metrics"],
            "newest_supervised_us": state["newest_supervised_us"],
            "attention": state.get("attention"),
            "advice": with_evaluation(state.get("advice", []), 0.0 if not config.evaluation.parallel else None),
            **evaluating.collect(output, folder),
        }

    return run_stage(night, "train", identity, work, intact=checkpoint_intact)


def workplace(night: Night) -> Path:
    """Return where RUN.json and the child's log lie: the night's folder, or its like in a remote home's local state."""
    folder = night.folder("train")
    if store.is_local(folder):
        return store.local_path(folder)
    return state_directory(night.home) / folder.removeprefix(f"{night.home}/")


def _is_finished(uri: str, identity: str) -> bool:
    """Tell whether a checkpoint is complete, undamaged, and made by this very training."""
    try:
        checkpoint = store.local_copy(uri)
        verify(checkpoint)
    except (FormatError, FileNotFoundError):
        return False
    return bool(read_state(checkpoint)["fingerprint"] == identity)


def checkpoint_intact(trained: dict[str, Any]) -> bool:
    """Tell whether a training's checkpoint is complete, undamaged, and the one that the result describes."""
    try:
        verify(store.local_copy(trained["uri"]))
        state = store.read_json(store.join(trained["uri"], "state.json"))
    except (FormatError, FileNotFoundError, ValueError):
        return False
    return bool(state["digest"] == trained["digest"])


def run_file(night: Night, packs: dict[str, Any], words: dict[str, Any], output: Path, identity: str) -> dict[str, Any]:
    """Return RUN.json (examples 9): local paths, relative to its own folder."""
    resolved = night.settings.resolved()
    vocabulary = store.local_copy(words["uri"])
    described = store.read_json(str(vocabulary / "vocabulary.json"))["tables"]
    here = workplace(night)
    roles = ("train", "holdout") if evaluating.is_wanted(night, packs) else ("train",)

    def relative(path: Path) -> str:
        return os.path.relpath(path, here)

    return {
        "packs": {role: relative(store.local_copy(packs[role]["uri"])) for role in roles},
        "evaluation": night.settings.evaluation.model_dump(mode="json", exclude={"slices"}),
        "vocabulary": {
            name: {
                "rows": table["rows"],
                "capacity": table["capacity"],
                "fallbacks": table["fallbacks"],
                "path": relative(vocabulary / f"{name}.arrow"),
            }
            for name, table in described.items()
        },
        "vocabulary_version": words["version"],
        "parent": relative(store.local_copy(night.parent.checkpoint)) if night.parent else None,
        "output": relative(output),
        "config": {name: resolved[name] for name in ("model", "attention", "train", "pack", "sequences")},
        "fingerprint": identity,
        "seed": night.seed,
        "device": "auto",
        "resume": night.force != "train",
    }


def run_training(
    run: Path,
    progress: Callable[[dict[str, Any]], None] | None,
    *,
    timeout_seconds: float | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run `python -m gr_core.train RUN.json` and wait; the child ends when this process does.

    The child's stdin is a pipe that nobody writes to: it closes with this process, also after kill -9, and the child
    takes that as its end (case A9), so that no orphan trains beside the next attempt.

    Args:
        run: RUN.json.
        progress: Called with each progress line of the child.
        timeout_seconds: The child is killed after so long; None: never.
        arguments: Further arguments of `python -m gr_core.train`.

    Returns:
        The child's last object: done, or attribution where the arguments ask for it.

    Raises:
        TrainingError: The child stopped, or ran too long; its own words, or its exit status.
    """
    command = launch.command(run, [str(run), "--exit-with-stdin", *arguments])
    said: dict[str, Any] = {}
    log = run.with_name("train.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_variables()
        ) as child,
        children.known(child, _stop),
    ):
        watchdog = threading.Timer(timeout_seconds or threading.TIMEOUT_MAX, _stop, (child,))
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in _json_lines(child.stdout or []):
                said = said if said.get("event") == "error" else line  # of several ranks' errors the first
                if line.get("event") == "progress" and progress is not None:
                    progress(line)
            status = child.wait()
        except BaseException:
            _stop(child)
            raise
        finally:
            watchdog.cancel()
    if status == 0 and said.get("event") in ("done", "attribution"):
        return said
    if said.get("event") == "error":
        raise TrainingError(said["message"], where=said.get("where"))
    last = log.read_text().rstrip("\n =").rpartition("\n")[2].strip()  # torchrun ends its own with a rule
    raise TrainingError(f"training ended with status {status}; the last line of its log: {last}", where=str(log))


def _stop(child: subprocess.Popen[str]) -> None:
    """Kill the child; ranks that it started live in sessions of their own and end when its stdin closes."""
    child.kill()
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()


def _json_lines(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith("{"):
            yield json.loads(line)
