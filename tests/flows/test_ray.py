"""Buckets on Ray: the same night as in threads, also when a worker is killed under it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.nightly import nightly

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("default"),  # a whole night runs Ray, MLflow and pandas, with warnings of theirs
]
BUCKETS = 8


class Killer(threading.Thread):
    """Kills the first Ray worker of this test that it sees at work on a bucket, once; remembers all workers seen."""

    def __init__(self, at_work: bytes) -> None:
        super().__init__(daemon=True)
        self.at_work = at_work
        self.killed: int | None = None
        self.workers: set[int] = set()
        self.ended = threading.Event()

    def run(self) -> None:
        """Look every few milliseconds until told to end."""
        while not self.ended.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    mine = self.at_work in (process / "cmdline").read_bytes()
                except OSError:
                    continue
                if not mine:
                    continue
                self.workers.add(int(process.name))
                if self.killed is None:
                    self.killed = int(process.name)
                    os.kill(self.killed, signal.SIGKILL)
            time.sleep(0.005)


def results(home: Path) -> dict[str, Any]:
    """Return what the stages of the night made, by manifest: digests and counts, no times and places."""
    found = {}
    for path in sorted((home / "nights").glob("*/manifests/*.json")):
        result = json.loads(path.read_text())["result"]
        kept = ("digest", "counts", "num_tokens", "num_supervised", "version", "step", "gate", "rows")
        found[path.stem] = {key: result[key] for key in kept if key in result}
    return found


def test_a_night_on_ray_equals_one_in_threads_with_a_worker_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight buckets on two workers, one of them killed at work: the night completes, and all it made is equal."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 2}))
    config = tiny.make(tmp_path, days=1)
    config.write_text(config.read_text().replace("num_buckets = 2", f"num_buckets = {BUCKETS}"))
    arguments: dict[str, Any] = {"config": str(config), "date": tiny.FIRST_DAY}
    nightly(**arguments, home=str(tmp_path / "threads"))

    killer = Killer(b"ray::sequences")
    killer.start()
    night: Any = nightly(**arguments, home=str(tmp_path / "ray"), runner="ray")
    killer.ended.set()
    killer.join()

    assert night["state"] == "completed"
    assert killer.killed is not None
    assert 2 <= len(killer.workers) <= 2 + 2, "two workers, and whoever replaced the killed one"
    assert len([name for name in results(tmp_path / "ray") if name.startswith("sequences-")]) == BUCKETS
    assert results(tmp_path / "ray") == results(tmp_path / "threads")


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional packages --runner ray says what to install."""
    from flows.runners import bucket_runner
    from gr_core.errors import UsageError

    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(UsageError, match=r"\.\[ray\]"), bucket_runner("ray"):
        pass
