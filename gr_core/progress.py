"""How far a night is, for people who ask while it runs: one small local file, written as stages begin and end.

Nothing of the night reads it, so it may use the clock, be lost, or lag. It lies in the home's local state: of a home on
s3://, other machines see the journal's word alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gr_core.environment import state_directory

_lock = threading.Lock()
_known: dict[Path, dict[str, dict[str, Any]]] = {}


@contextlib.contextmanager
def of_stage(home: str, night: str, stage: str) -> Iterator[None]:
    """Tell for the block that a stage, or one of several parts of it, runs; on an error it stays as not ended.

    Args:
        home: URI of the home.
        night: The night's key.
        stage: The stage.
    """

    def begin(told: dict[str, Any]) -> None:
        told.setdefault("started_us", _now_us())
        told["running"] = told.get("running", 0) + 1

    def end(told: dict[str, Any]) -> None:
        told["running"] -= 1
        told["parts"] = told.get("parts", 0) + 1
        told["ended_us"] = _now_us()

    _tell(home, night, stage, begin)
    yield
    _tell(home, night, stage, end)


def step(home: str, night: str, done: int, of: int) -> None:
    """Tell how many of its steps training has done."""
    _tell(home, night, "train", lambda told: told.update(step=done, steps=of))


def read(home: str, night: str) -> dict[str, dict[str, Any]]:
    """Return what was told of a night's attempt: stage -> started_us, running and ended parts, steps; empty where nothing."""
    try:
        found = json.loads(_path(home, night).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def clear(home: str, night: str) -> None:
    """Forget a night: it begins anew, or has ended."""
    path = _path(home, night)
    with _lock:
        _known.pop(path, None)
    path.unlink(missing_ok=True)


def _tell(home: str, night: str, stage: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = _path(home, night)
    with _lock:
        stages = _known.setdefault(path, {})
        change(stages.setdefault(stage, {}))
        text = json.dumps(stages).encode()
        with contextlib.suppress(OSError):  # a full disk is the night's own trouble, not that of who looks on
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")
            unfinished.write_bytes(text)
            os.replace(unfinished, path)


def _path(home: str, night: str) -> Path:
    return state_directory(home) / "progress" / f"{night}.json"


def _now_us() -> int:
    return time.time_ns() // 1000
