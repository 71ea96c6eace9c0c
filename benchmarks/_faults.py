"""Nights that are killed, and what is left of them: the parts of `benchmarks.faults`.

A trial copies a home after its first night, starts the second night in a session of its own, kills the whole process
group (or the training child alone) at a given moment, runs the night again, and compares what stands then with the
undisturbed night: champion, versions, rows, counts, metrics and the checkpoint's digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gr_core.config import Config
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, champion, nights, versions
from gr_core.report.status import night_object
from gr_core.stages import moving

ROOT = Path(__file__).parent.parent
SECONDS = 600  # that one night may take before it counts as hanging
_APART = ("seconds", "attempts", "mlflow", "checkpoints")  # of a night's object: how it came about
STAGES = ("ingest", "sequences", "vocabulary", "encode", "pack", "train", "evaluate", "register", "gate")
_REUSED = re.compile(
    r"\b(ingest|sequences|vocabulary|encode|pack|train|evaluate|register|gate)\b[^:\n]*: already done, reused"
)
_RESUMED = re.compile(r"resum\w* .*step (\d+)", re.IGNORECASE)

Command = Callable[[Path], Sequence[str]]
"""The command that runs the night in a home."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One run of a night's command."""

    status: int
    seconds: float
    out: str
    log: str

    @property
    def taken_up(self) -> list[str]:
        """Stages that were not done again, and the training step that was gone on from."""
        found = list(dict.fromkeys(_REUSED.findall(self.log)))
        resumed = _RESUMED.search(self.log)
        return [*found, *([f"step {resumed.group(1)}"] if resumed else [])]


@dataclass(kw_only=True, slots=True)
class Trial:
    """One disturbed night."""

    kind: str
    seed: int
    moments: list[float] = field(default_factory=list)
    """Seconds after the start of each run that was killed."""
    hit: list[str] = field(default_factory=list)
    """The stage that each kill met."""
    taken_up: list[str] = field(default_factory=list)
    """By the last run."""
    status: int = 0
    """Exit status of the last run."""
    differs: list[str] = field(default_factory=list)
    """What is not as after the undisturbed night."""

    @property
    def equal(self) -> bool:
        """Tell whether the night ended as the undisturbed one."""
        return not self.differs


def run(command: Sequence[str], folder: Path, kill: Callable[[subprocess.Popen[bytes]], None] | None = None) -> Ran:
    """Run a night's command in a session of its own to its end, or until `kill` has killed it."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        night = subprocess.Popen(command, stdout=out, stderr=log, cwd=folder, env=variables, start_new_session=True)
        try:
            if kill is not None:
                kill(night)
            status = night.wait(SECONDS)
        finally:
            kill_group(night)
    seconds = time.perf_counter() - started
    texts = ((folder / name).read_text(errors="replace") for name in ("out", "log"))
    return Ran(status=status, seconds=seconds, out=next(texts), log=next(texts))


def kill_group(night: subprocess.Popen[bytes]) -> None:
    """Kill -9 a night with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(night.pid, signal.SIGKILL)
    night.wait()


def at_moment(moment: float) -> Callable[[subprocess.Popen[bytes]], None]:
    """Kill the whole group so many seconds after its start, unless the night has ended before."""

    def kill(night: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            night.wait(moment)
            return
        kill_group(night)

    return kill


def in_stage(
    home: Path, key: str, num_buckets: int, stage: str, moment: float
) -> Callable[[subprocess.Popen[bytes]], None]:
    """Kill the whole group so many seconds after the night in this home came to a stage."""

    def kill(night: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while night.poll() is None and time.monotonic() < deadline:
            if stage_hit(home, key, num_buckets) == stage:
                at_moment(moment)(night)
                return
            time.sleep(0.01)

    return kill


def training_child(moment: float) -> Callable[[subprocess.Popen[bytes]], None]:
    """Kill the training child alone, so many seconds after it came up."""

    def kill(night: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while night.poll() is None and time.monotonic() < deadline:
            found = _child_of(night.pid, b"gr_core.train")
            if found is not None:
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    night.wait(moment)
                    return
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found, signal.SIGKILL)
                return
            time.sleep(0.02)

    return kill


def _child_of(group: int, word: bytes) -> int | None:
    """Return a process of a session whose command line has a word."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if word in (process / "cmdline").read_bytes() and os.getsid(int(process.name)) == group:
                return int(process.name)
        except (OSError, ValueError):
            continue
    return None


def stage_hit(home: Path, key: str, num_buckets: int) -> str:
    """Return the first stage of a night that has not left all its manifests."""
    record = nights(Journal(f"{home}/lake/journal").entries()).get(key)
    if record is None:
        return "before open"
    if record.is_finished:
        return "after finish"
    there = [path.stem for path in (home / "nights" / key / "manifests").glob("*.json")]
    wanted = {"sequences": num_buckets, "encode": num_buckets, "pack": 3}
    for stage in STAGES:
        if sum(name.partition("-")[0] == stage for name in there) < wanted.get(stage, 1):
            return stage
    return "finish"


def standing(config: Config, home: Path, key: str) -> dict[str, Any]:
    """Return what stands after a night, but for how it came about."""
    entries = Journal(f"{home}/lake/journal").entries()
    record, best, known = nights(entries).get(key), champion(entries), versions(entries)
    if record is None:
        return {"state": "never opened"}
    night = {name: value for name, value in night_object(record).items() if name not in _APART}
    own = known.get(record.version or 0)
    state = Path(own.checkpoint) / "state.json" if own else None
    return {
        **night,
        "champion": best.version if best else None,
        "versions": sorted(known),
        "digest": own.digest if own else None,
        "checkpoint": json.loads(state.read_text())["digest"] if state and state.exists() else None,
        "table": EventTable(f"{home}/lake/events", config).check_rows(),
        "kinds": [entry.kind for entry in entries if entry.night == key and entry.kind in ("decided", "finished")],
        **_mlflow(home, key),
    }


def _mlflow(home: Path, key: str) -> dict[str, Any]:
    """Return the states of the night's MLflow runs, how many versions there are, and where the champion's alias is."""
    database = home / "mlflow.db"
    if not database.exists():
        return {}
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        runs = connection.execute("SELECT name, status FROM runs ORDER BY name").fetchall()
        models = connection.execute("SELECT version FROM model_versions ORDER BY version").fetchall()
        aliases = connection.execute("SELECT alias, version FROM registered_model_aliases ORDER BY alias").fetchall()
    del key
    return {"runs": runs, "models": models, "aliases": aliases}


def differing(calm: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values are not the undisturbed night's."""
    return sorted(name for name in calm.keys() | found.keys() if calm.get(name) != found.get(name))


def promote_first(config: Config, home: Path) -> None:
    """Make the first version the champion where so small a night was held, so that the next night has a parent."""
    if champion(Journal(f"{home}/lake/journal").entries()) is None:
        moving.promote(config, str(home), 1, reason="a first model to start from", at_us=1)


def copy_home(base: Path, home: Path) -> Path:
    """Copy a home; returns the copy."""
    shutil.copytree(base, home, symlinks=True)
    return home


def nightly(config: Path, day: str, overrides: Sequence[str]) -> Command:
    """Return the product's own command of a night."""
    more = [word for one in overrides for word in ("--set", one)]

    def command(home: Path) -> list[str]:
        words = ["nightly", "--config", str(config), "--home", str(home), "--date", day, "--json", *more]
        return [sys.executable, "-m", "flows.cli", *words]

    return command
