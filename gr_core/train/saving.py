"""Checkpoints of a running training: written beside the loop, kept by number, and where a killed training goes on.

A step checkpoint (layout: gr_core.train.state) holds what a final one does and, besides, what the night has summed up so
far (tensors `night.*`, entry `night` of state.json), so that a resumed night ends as one that was never killed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from gr_core.errors import FormatError, TrainingError
from gr_core.train.attribution import Attribution
from gr_core.train.distributed import Ranks
from gr_core.train.optim import DenseOptimizer, Rates, SparseOptimizer
from gr_core.train.run import Run
from gr_core.train.running_metrics import RunningMetrics
from gr_core.train.series import SERIES_FILE, StepSeries
from gr_core.train.state import (
    load_checkpoint,
    read_state,
    remove_steps,
    save_checkpoint,
    step_checkpoints,
    step_path,
    tensors_finite,
    verify,
)
from gr_core.train.transfer import Event

logger = logging.getLogger(__name__)


class Training(Protocol):
    """A night in training, as far as saving and resuming need it."""

    run: Run
    global_step: int
    """Optimizer steps of the lineage."""
    cursor: int
    """Batches of the night that are consumed."""
    series: StepSeries
    save_seconds: float
    """How long the loop stood still for step checkpoints: copies to host memory, and waits for the save before."""
    metrics: RunningMetrics
    """This rank's counts."""
    loss_sum: Tensor
    loss_weight: float
    """Of all ranks."""
    newest: dict[str, int]
    dense: DenseOptimizer
    sparse: SparseOptimizer
    ranks: Ranks
    last_good: Callable[[], Path | None]
    """Newest checkpoint that the training can go on from."""

    def checkpoint(self, clock: Attribution) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a checkpoint holds now: tensors by name (views where possible), and the values of state.json.

        Every rank calls it; only the first one's result counts.
        """

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's parameters and optimizer state."""


def finished_state(run: Run) -> dict[str, Any] | None:
    """Return state.json of the run's checkpoint where it is complete and made by this very training, else None."""
    if not run.resume:
        return None
    try:
        state = read_state(run.output)
    except FormatError:
        return None
    return state if state["fingerprint"] == run.fingerprint else None


class StepSaver:
    """Saves a running night every `train.save_every_steps` optimizer steps, and takes one up that was killed.

    The tensors are copied to host memory (pinned on CUDA, where the host does not wait either); a thread checks, hashes
    and writes them. The loop waits only when the save before is still being written. Use it as a context manager:
    leaving it waits for what is being written, also on an error, so that the last good checkpoint is there. On several
    ranks each has one; the first writes.

    Args:
        run: The night's run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._every, self._keep = run.train.save_every_steps, run.train.keep_checkpoints
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="daybreak-save")
        self._writing: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        self._since = 0
        self._saved = -1
        self._is_first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.wait()
        except TrainingError:
            if error is None:
                raise
        finally:
            self._pool.shutdown()

    def start(self, night: Training, groups: Sequence[Sequence[int]]) -> int:
        """Take the night up where it was killed, or start it anew; what cannot be used is removed.

        Args:
            night: The night, warm-started.
            groups: Batch numbers of each step.

        Returns:
            How many of the groups are done.
        """
        self._since = night.global_step
        self._is_first = night.ranks.is_first
        night.last_good = self.last_good
        ends = [0, *(group[-1] + 1 for group in groups)]
        # the first rank chooses, so that all go on from one checkpoint
        step = night.ranks.told(self._choose(ends) if self._is_first else -1)
        if step < 0:
            return 0
        path = step_path(self._run.output, step)
        tensors, state = load_checkpoint(path)
        _restore(night, path, tensors, state)
        self._saved = step
        logger.info("going on from %s: %d of %d batches are consumed", path, night.cursor, ends[-1])
        return ends.index(night.cursor)

    def _choose(self, ends: Sequence[int]) -> int:
        """Return the step of the newest checkpoint that can be used, -1 where there is none; removes all newer ones."""
        if not self._run.resume:
            remove_steps(self._run.output)
        for path in reversed(step_checkpoints(self._run.output)):
            try:
                verify(path)
                state = read_state(path)
                self._check(path, state, ends)
            except FormatError as error:
                logger.warning("step checkpoint %s is passed over: %s", path, error.message)
                shutil.rmtree(path, ignore_errors=True)  # else it would count as one of the newest that are kept
                continue
            return int(state["step"])
        return -1

    def _check(self, path: Path, state: Mapping[str, Any], ends: Sequence[int]) -> None:
        if state["fingerprint"] != self._run.fingerprint:
            raise FormatError("it belongs to another training (fingerprint)", where=str(path))
        if "night" not in state or state["cursor"]["batch"] not in ends or state["cursor"]["batches"] != ends[-1]:
            raise FormatError("its cursor stands at no step of this night", where=str(path))

    def after_step(self, night: Training, clock: Attribution) -> None:
        """Save when it is due.

        Raises:
            TrainingError: The save before found a tensor that is not finite.
            OSError: The save before could not be written.
        """
        taken = night.global_step - self._since
        is_due = self._every > 0 and taken > 0 and taken % self._every == 0
        if not is_due or night.global_step == self._saved:  # a step without a supervised token is none
            return
        began = time.perf_counter()
        self.wait()
        tensors, state = night.checkpoint(clock)
        if state["cursor"]["batch"] == state["cursor"]["batches"]:
            return  # the final checkpoint follows at once
        counts = night.ranks.total(night.metrics).state()
        self._saved = night.global_step
        if self._is_first:
            sums = {f"night.metrics.{name}": tensor for name, tensor in counts.items()}
            ready = self._snapshot(tensors | sums | {"night.loss_sum": night.loss_sum})
            rates = {"dense": asdict(night.dense.rates), "sparse": asdict(night.sparse.rates)}
            state |= {"night": {"loss_weight": night.loss_weight, "rates": rates}}
            self._writing = self._pool.submit(self._write, state, night.series.to_bytes(), ready)
        night.save_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            TrainingError: A tensor is not finite; nothing was written.
            OSError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def last_good(self) -> Path | None:
        """Return the newest checkpoint that the training can go on from: of this night, else the parent."""
        try:
            self.wait()
        except (TrainingError, OSError):
            logger.exception("the last save came to nothing")
        return next(reversed(step_checkpoints(self._run.output)), self._run.parent)

    def finish(self) -> None:
        """Remove the night's step checkpoints: the final one is there."""
        if self._is_first:
            remove_steps(self._run.output)

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> Event | None:
        """Copy tensors to host memory that is used again and again; returns what the copies end with, None: now."""
        on_cuda = False
        for name, tensor in tensors.items():
            host = self._host.get(name)
            if host is None:
                pinned = tensor.device.type == "cuda"
                host = self._host[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            host.copy_(tensor, non_blocking=True)
            on_cuda |= tensor.device.type == "cuda"
        if not on_cuda:
            return None
        # later steps change the tensors on this very stream, so after the copies
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cast(Event, event)

    def _write(self, state: Mapping[str, Any], series: bytes, ready: Event | None) -> None:
        """Write one checkpoint from host memory, in the thread, and remove the oldest beyond those that are kept."""
        if ready is not None:
            ready.synchronize()
        refuse_non_finite(self._host, int(state["step"]), self._run)
        path = step_path(self._run.output, int(state["step"]))
        save_checkpoint(path, self._host, state, self._run.vocabulary_files, {SERIES_FILE: series})
        for old in step_checkpoints(self._run.output)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def refuse_non_finite(tensors: Mapping[str, Tensor], step: int, run: Run) -> None:
    """Refuse to write tensors of which one is not finite: nothing else may become a parent.

    Raises:
        TrainingError: Names the step.
    """
    if not tensors_finite(tensors):
        last_good = next(reversed(step_checkpoints(run.output)), run.parent)
        raise TrainingError(
            f"a parameter is not finite after step {step}; nothing was written, the last good checkpoint is {last_good}",
            where=str(run.output),
        )


def _restore(night: Training, path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Go on from a step checkpoint of this very night, bit for bit.

    Raises:
        FormatError: A tensor is missing or has another shape.
    """
    night.load(tensors)
    if night.ranks.is_first:  # counts are added up over the ranks
        night.metrics.load({name: tensors[f"night.metrics.{name}"] for name in night.metrics.state()})
    night.loss_sum.copy_(tensors["night.loss_sum"])
    night.loss_weight = state["night"]["loss_weight"]
    night.series.load(path)
    rates = state["night"]["rates"]
    night.dense.rates, night.sparse.rates = Rates(**rates["dense"]), Rates(**rates["sparse"])
    night.newest = dict(state["newest_supervised_us"])
    night.global_step, night.cursor = state["step"], state["cursor"]["batch"]
