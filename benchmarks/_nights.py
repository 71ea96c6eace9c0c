"""Nights without Prefect and MLflow: the product's own stages in order, every challenger promoted, in a home of its own.

What a benchmark of quality needs of a night and nothing else: the journal pins and finishes it as in the product, so
parents, bounds and what is new are the product's; gate, registry and status are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date as Date
from pathlib import Path
from typing import Any, Self, TypeVar

from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.lake.journal import champion
from gr_core.night import Night, open_night
from gr_core.stages import ingesting, judging, packing, sequencing, training

T = TypeVar("T")
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataResult:
    """What the stages from raw files to packs returned."""

    ingested: dict[str, Any]
    buckets: list[dict[str, Any]]
    """One a bucket."""
    words: dict[str, Any]
    """The grown vocabulary."""
    packs: dict[str, Any]
    """Role to PackRef."""
    seconds: dict[str, float]
    """Wall time by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NightResult:
    """What the stages of one night returned."""

    night: Night
    ingested: dict[str, Any]
    words: dict[str, Any]
    """The grown vocabulary."""
    packs: dict[str, Any]
    """Role to PackRef."""
    trained: dict[str, Any]
    evaluated: dict[str, Any]
    """The parent on the night's new events."""
    seconds: float
    """Wall time from the check of the raw files to the journal's last entry."""

    def auc(self, action: str) -> float | None:
        """Return the parent's next_day AUC of an action; None without a parent or with one class only."""
        found: float | None = self.evaluated["next_day"][action]["auc"]
        return found


def run_night(config: Config, home: str, day: Date) -> NightResult:
    """Run one night's stages one after the other; its challenger is the next night's parent.

    Args:
        config: The config.
        home: URI of the home.
        day: The lake day; days must come in order.

    Returns:
        The results of all stages.

    Raises:
        UsageError: Nothing is due: the benchmark's days are chosen so that this does not happen.
        DaybreakError: Whatever a stage raises.
    """
    started = time.perf_counter()
    night = open_day(config, home, day)
    data = run_data(night)
    evaluated = judging.evaluate(night, data.packs["next_day"], data.words)
    trained = training.train(night, data.packs, data.words)
    promote(night, data, trained)
    return NightResult(
        night=night,
        ingested=data.ingested,
        words=data.words,
        packs=data.packs,
        trained=trained,
        evaluated=evaluated,
        seconds=time.perf_counter() - started,
    )


def open_day(config: Config, home: str, day: Date) -> Night:
    """Check a day's raw files and pin its night."""
    ingesting.preflight(config, home, day)
    return open_night(config, home, day, at_us=time.time_ns() // 1000, mode="backfill")


def run_data(night: Night, *, workers: int = 1) -> DataResult:
    """Run the stages from raw files to packs.

    Args:
        night: An opened night.
        workers: Buckets side by side, as the flow maps them.

    Returns:
        Their results and wall times.

    Raises:
        UsageError: Nothing is due.
        DaybreakError: Whatever a stage raises.
    """
    seconds: dict[str, float] = {}
    every = range(night.settings.lake.num_buckets)
    with ThreadPoolExecutor(workers) as pool:

        def mapped(work: Callable[[int], T]) -> list[T]:
            return list(pool.map(work, every)) if workers > 1 else [work(bucket) for bucket in every]

        ingested = _timed(seconds, "ingest", lambda: ingesting.ingest(night))
        buckets = _timed(
            seconds, "sequences", lambda: mapped(lambda bucket: sequencing.build_bucket(night, ingested, bucket))
        )
        if not judging.any_due(buckets):
            raise UsageError(f"nothing is due on {night.day}; choose days with events", where=night.date)
        words = _timed(seconds, "vocabulary", lambda: packing.grow_vocabulary(night, buckets))
        encoded = _timed(
            seconds, "encode", lambda: mapped(lambda b: packing.encode_bucket(night, buckets[b], words, b))
        )
        inputs = (night, ingested, buckets, encoded, words)
        packed = _timed(
            seconds,
            "pack",
            lambda: list(pool.map(lambda role: packing.write_pack(*inputs, role), sequencing.ROLES)),
        )
        packs: dict[str, Any] = dict(zip(sequencing.ROLES, packed, strict=True))
    return DataResult(ingested=ingested, buckets=buckets, words=words, packs=packs, seconds=seconds)


def _timed(seconds: dict[str, float], stage: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    found = work()
    seconds[stage] = time.perf_counter() - began
    return found


def unread_checkpoint(night: Night) -> str:
    """Make the folder of a checkpoint that nobody reads; a night asks no more of its parent's than that it is there.

    Returns:
        Its path.
    """
    folder = Path(night.home) / "unread" / night.key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}")
    return str(folder)


def promote(night: Night, data: DataResult, trained: dict[str, Any]) -> None:
    """Write to the journal what registry and gate would: the challenger is the champion, the night is finished.

    Args:
        night: The night.
        data: Its data stages.
        trained: What its training returned: uri, watermark, digest.
    """
    journal = night.journal
    standing = champion(journal.entries())
    before = standing.version if standing else None
    version = (before or 0) + 1
    registered = judging.registration(night, version, trained, data.words)
    decided = {"decision": "promote", "reasons": ["benchmark"], "version": version, "previous": before, "figures": {}}
    finished = {"state": "completed", "bound": data.ingested["bound"], "status": {}}
    for kind, payload in (("registered", registered), ("decided", decided), ("finished", finished)):
        journal.append(kind, night.key, payload, at_us=night.at_us)


@dataclass(kw_only=True, slots=True)
class TrainingMemory:
    """Watches the peak memory of training children while it is entered (Linux).

    RUSAGE_CHILDREN cannot tell it: between fork and exec a child counts this process's memory as its own, so that a
    child smaller than its parent reports the parent's peak. The kernel's high-water mark of the child itself does not.
    """

    peak_bytes: int = 0
    """Largest resident set of any child so far; 0 where none was seen."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start to watch."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            for process in _training_children():
                self.peak_bytes = max(self.peak_bytes, _high_water_bytes(process))


def _training_children() -> list[Path]:
    """Return /proc folders of this process's children that run `python -m gr_core.train`."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        for child in _read(listing).split():
            process = Path("/proc") / child
            if "gr_core.train" in _read(process / "cmdline"):
                found.append(process)
    return found


def _high_water_bytes(process: Path) -> int:
    for line in _read(process / "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    """Return a file's text; empty when the process has just ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
