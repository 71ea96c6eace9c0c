"""A night's training, top to bottom: warm start, one pass over the pack, checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gr_core.data.batches import PackReader
from gr_core.data.prefetch import Prefetched
from gr_core.model.inputs import InputBuilder, Inputs
from gr_core.model.losses import batch_loss, token_losses
from gr_core.model.recommender import new_recommender
from gr_core.train.advice import advise, nodes_of
from gr_core.train.attention import attention_of
from gr_core.train.attribution import Attribution, attribution
from gr_core.train.baseline import new_tables
from gr_core.train.belonging import check_pack, check_parent
from gr_core.train.compute import Compilation, execution_of, memory_metrics, use_kernels
from gr_core.train.denominators import BatchWeights, logit_offset, weighting_of
from gr_core.train.distributed import Ranks, StepEnd, blank_batch, connect, device_of
from gr_core.train.flops import BatchFlops, ModelFlops
from gr_core.train.optim import DenseOptimizer, copy_tensors, new_sparse_optimizer, own_part, schedule
from gr_core.train.run import Run
from gr_core.train.running_metrics import new_metrics
from gr_core.train.saving import StepSaver, finished_state, refuse_non_finite
from gr_core.train.series import SERIES_FILE, StepSeries
from gr_core.train.state import load_checkpoint, remove_steps, save_checkpoint
from gr_core.train.transfer import Sent, Transfer

logger = logging.getLogger(__name__)
Say = Callable[[dict[str, Any]], None]
_PROGRESS_SECONDS = 0.5


def train(run: Run, say: Say, *, trace: Path | None = None) -> dict[str, Any]:
    """Train one night and write its checkpoint; a finished one with the same fingerprint is left as it is.

    Args:
        run: What to train on, from where, with which settings.
        say: Called with progress objects, at most two a second.
        trace: Where two steps are recorded by torch.profiler; None: nowhere.

    Returns:
        The checkpoint's state.json; {} on ranks other than the first.

    Raises:
        FormatError: A pack, parent or vocabulary of another format, or one that does not belong to this run.
        ConfigError: A model that differs from the parent's, or a pack that this release cannot train on.
        TrainingError: A loss or gradient is not finite; nothing was written.
    """
    ranks = connect(run.train.distributed, run.device)
    finished = finished_state(run)
    if ranks.is_agreed(yes=finished is not None):
        remove_steps(run.output)  # where the kill came between the final checkpoint and this
        logger.info("checkpoint %s is finished with this fingerprint; nothing to train", run.output)
        ranks.close()
        return finished or {}
    torch.set_num_threads(run.train.num_threads)
    night = Night(run, ranks)
    groups = _groups(len(night.reader), run.train.micro_batches)
    saver = StepSaver(run)
    done = saver.start(night, groups)
    clock = night.clock(len(groups) - done, trace)
    said = -math.inf
    with saver, Prefetched(night.prepared(groups[done:])) as ready:
        for step, numbers in enumerate(groups[done:], start=done):
            with clock.step():
                night.step(numbers, schedule(step, len(groups), run.train), clock, ready)
            saver.after_step(night, clock)
            if time.monotonic() - said >= _PROGRESS_SECONDS or step == len(groups) - 1:
                said = time.monotonic()
                progress = {"step": step + 1, "steps": len(groups), "loss": night.mean_loss}
                speed = {"tokens_per_second": round(clock.tokens_per_second)}
                say({"event": "progress", **progress, **night.rates(), **speed})
        saver.wait()
        state = night.save(clock)
    saver.finish()
    ranks.close()
    return state


def _groups(num_batches: int, micro_batches: int) -> list[list[int]]:
    """Return the batch numbers of each step."""
    return [list(range(i, min(i + micro_batches, num_batches))) for i in range(0, num_batches, micro_batches)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Micro:
    """A micro-batch, ready for the model."""

    number: int
    """The batch in the pack."""
    num_tokens: int
    sent: Sent
    """Its inputs, on their way to the device."""
    seed: int
    """Of the draws inside the model."""
    newest: dict[str, int]
    """Newest shown_at (us) of a known and due label by action."""
    flops: BatchFlops


class Night:
    """Model, tables, optimizers and counters of one night, warm-started from the parent.

    Args:
        run: The night's run.
        ranks: Those that train it together; None: this process alone.
    """

    def __init__(self, run: Run, ranks: Ranks | None = None) -> None:
        self.run = run
        self.ranks = Ranks(device_of(run.device)) if ranks is None else ranks
        self.reader = PackReader(run.pack)
        index = self.reader.index
        check_pack(run, index)
        self.device = self.ranks.device
        use_kernels(run.train, self.device)
        self.actions: list[str] = list(index["actions"])
        tables = tuple(sorted(run.tables, key=lambda t: run.model.features.index(t.name)))
        self.tables = new_tables(self.ranks, tables, run.model.width, run.seed, run.train)
        self.attention = attention_of(run, index, self.device)
        self.builder = InputBuilder(
            run.model,
            len(self.actions),
            index["supervised"],
            self.tables.map,
            weighting=weighting_of(run, index),
            planner=self.attention.planner,
            interleaved=index["tokens"] == "interleaved",
        )
        self.supervised = [self.actions[bit] for bit in self.builder.bits]
        self.model = new_recommender(run.model, len(self.actions), len(self.supervised), run.seed).to(self.device)
        execution_of(run.train).apply(self.model)
        self._flops = ModelFlops.of(self.model, width=run.model.width, num_layers=run.model.num_layers)
        self._parallel = self.ranks.parallel(self.model)
        self.compilation = Compilation(self._parallel, self.builder, self.reader.features, run.train)
        self.dense = DenseOptimizer(self.model, run.train)
        self.sparse = new_sparse_optimizer(self.tables, self.model, run.train)
        self.parent_state = self._warm_start()
        self.global_step: int = self.parent_state["step"] if self.parent_state else 0
        self.newest: dict[str, int] = dict(self.parent_state["newest_supervised_us"]) if self.parent_state else {}
        self.cursor = 0
        self.series = StepSeries()
        self.save_seconds = 0.0
        self.last_good: Callable[[], Path | None] = lambda: run.parent
        weights = [run.train.action_weights.get(name, 1.0) for name in self.supervised]
        self._action_weights = torch.tensor(weights, device=self.device)
        self._batch_weights = BatchWeights(self.reader, self.builder.weighting)
        self._logit_offset = logit_offset(index)
        self._transfer = Transfer(self.device)
        self.metrics = new_metrics(run.train.metrics, len(self.supervised), self.device)
        self._blank = self.builder.build(blank_batch(self.reader.features)).to(self.device)
        self.loss_sum, self.loss_weight = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        self._begin_step()

    def clock(self, steps: int, trace: Path | None = None) -> Attribution:
        """Return what measures so many steps, from now on; see `attribution`."""
        budget = int(self.reader.index["token_budget"])
        return attribution(self.run, self.device, token_budget=budget, steps=steps, trace=trace)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss of the night so far, weighted as the loss is; None before the first supervised token."""
        return float(self.loss_sum) / self.loss_weight if self.loss_weight else None

    def prepared(self, groups: Sequence[Sequence[int]]) -> Iterator[_Micro]:
        """Build the micro-batches of the next steps, in their order; they depend on the pack, the seed and the step alone.

        Args:
            groups: Batch numbers of each step; nothing is built for a step without a supervised token.
        """
        taken = [numbers for numbers in groups if self._step_weight(numbers) > 0]
        plan = [
            (number, step, place)
            for step, numbers in enumerate(taken, start=self.global_step)
            for place, number in self.ranks.mine(self._supervised(numbers))
        ]
        read = (number for group in self.reader.touched([number for number, _, _ in plan]) for number in group)
        for number, (_, step, place) in zip(read, plan, strict=True):
            rng = np.random.default_rng([self.run.seed, step, place])
            batch = self.reader.batch(number)
            inputs = self.builder.build(batch, rng)
            newest = self._newest(batch.time.numpy()[inputs.targets.numpy()], inputs.known.numpy())
            seed = int(rng.integers(2**62))
            sent = self._transfer.send(inputs)
            flops = self._flops.of_batch(batch.lo.numpy(), batch.hi.numpy(), inputs.targets.numpy())
            yield _Micro(number=number, num_tokens=batch.num_tokens, sent=sent, seed=seed, newest=newest, flops=flops)

    def _step_weight(self, numbers: Sequence[int]) -> float:
        return sum(self._batch_weights.of(number) for number in numbers)

    def _supervised(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.reader.index["batch_weights"]["token"][number] > 0]

    def step(
        self, numbers: Sequence[int], factor: float, clock: Attribution, ready: Iterator[_Micro] | None = None
    ) -> None:
        """Take one optimizer step over its micro-batches, or none where nothing is supervised.

        Args:
            numbers: The step's batches.
            factor: Of the learning rates.
            clock: Counts time and tokens.
            ready: The micro-batches of this step and later ones, as `prepared` makes them; None: made on the spot.

        Raises:
            TrainingError: Loss or gradient not finite; no parameter was moved.
        """
        step_weight = self._step_weight(numbers)
        self.cursor = numbers[-1] + 1
        if step_weight <= 0:
            return
        self.model.train()
        ready = self.prepared([numbers]) if ready is None else ready
        self._begin_step()
        supervised = self._supervised(numbers)
        mine, turns = self.ranks.mine(supervised), self.ranks.turns(len(supervised))
        for turn in range(turns):
            with self.ranks.turn(last=turn == turns - 1):
                if turn == len(mine):
                    self._blank_turn(clock)
                    continue
                with clock.part("data_wait"):
                    micro = next(ready)
                    inputs = self._transfer.receive(micro.sent)
                assert micro.number == mine[turn][1], "micro-batches come in the order of the steps"
                self._micro_batch(micro, inputs, step_weight, factor, clock)
        with clock.part("optimizer"):
            norm = torch.where(self.sparse.finite(), self.dense.norm(), torch.nan)
            end = self.ranks.agree(
                StepEnd(norm=norm, loss=self._step_loss, weight=self._step_weight_done, bad_batch=self._bad_batch)
            )
            end.refuse_non_finite(self.run, self.global_step, numbers, self.last_good)
            self.dense.step(factor, end.norm)
            self.sparse.step(factor)
            self.dense.zero_grad()
        self.loss_sum += end.loss
        self.loss_weight += end.weight
        self.global_step += 1
        told = {"loss": float(end.loss) / step_weight, "norm": float(end.norm)}
        self.series.add(self.global_step, numbers[0], **told, rates=self.rates())

    def rates(self) -> dict[str, float | None]:
        """Return the learning rates of the newest step by what they move."""
        return {"dense_learning_rate": self.dense.rates.last, "sparse_learning_rate": self.sparse.rates.last}

    def _begin_step(self) -> None:
        self._step_loss, self._step_weight_done = torch.zeros_like(self.loss_sum), 0.0
        self._bad_batch: int | None = None

    def _blank_turn(self, clock: Attribution) -> None:
        """Take part in what the other ranks send in this turn; adds nothing to loss, gradients or metrics."""
        with clock.part("forward"):
            blank = self._blank
            values = self.tables.read(blank.rows).requires_grad_()
            loss = token_losses(self._parallel(values, blank), blank.labels, blank.known, self._action_weights).sum()
        with clock.part("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            assert values.grad is not None
            self.sparse.collect(blank.rows, values.grad)

    def _micro_batch(
        self, micro: _Micro, inputs: Inputs, step_weight: float, factor: float, clock: Attribution
    ) -> None:
        clock.count(micro.num_tokens, inputs.plan.padding_fraction, micro.flops)
        for name, shown in micro.newest.items():
            self.newest[name] = max(self.newest.get(name, -(2**62)), shown)
        with clock.part("forward"):
            torch.manual_seed(micro.seed)
            values = self.tables.read(inputs.rows).requires_grad_()
            logits = self._parallel(values, inputs)
            if self._logit_offset:
                logits = logits + self._logit_offset
            losses = token_losses(logits, inputs.labels, inputs.known, self._action_weights)
            loss = batch_loss(losses, inputs.weights, step_weight)
        if self._bad_batch is None and not bool(torch.isfinite(loss)):
            self._bad_batch = micro.number  # refused at the step's end: until then other ranks wait for this one's part
        with clock.part("backward"):
            self.sparse.watch(inputs.rows, values, loss, factor)
            loss.backward()  # type: ignore[no-untyped-call]
            assert values.grad is not None
            self.sparse.collect(inputs.rows, values.grad)
        if self._bad_batch is not None:
            return  # what is no number falls into no bin
        with clock.part("metrics"):
            self.metrics.update(logits.detach(), inputs.labels, inputs.known & inputs.fresh[:, None])
            self._step_loss += loss.detach().double() * step_weight
            self._step_weight_done += float(inputs.weights.sum(dtype=torch.float64))

    def _newest(self, shown: Any, known: Any) -> dict[str, int]:
        columns = dict(enumerate(self.supervised))
        return {name: int(shown[known[:, c]].max()) for c, name in columns.items() if known[:, c].any()}

    def _warm_start(self) -> dict[str, Any] | None:
        if self.run.parent is None:
            return None
        tensors, state = load_checkpoint(self.run.parent)
        check_parent(self.run, state, self.actions, self.supervised)
        self.load(tensors)
        self.sparse.forget()
        logger.info("warm start from %s at step %d", self.run.parent, state["step"])
        return state

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's parameters and optimizer state, or this rank's part of them.

        Raises:
            FormatError: A tensor is missing or does not fit.
        """
        pieces = self.ranks.pieces(tensors)
        copy_tensors(self._dense(), pieces)
        self.dense.load(pieces)
        self.tables.load(pieces)

    def _dense(self) -> dict[str, Tensor]:
        return {f"dense.{name}": own_part(p.detach()) for name, p in self.model.named_parameters()}

    def checkpoint(self, clock: Attribution) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a checkpoint holds now: tensors by name (views where possible), and the values of state.json.

        Every rank calls it; only the first one's result counts.
        """
        tensors = self.ranks.whole(self._dense() | self.dense.state()) | self.tables.state()
        return tensors, self._state(clock)

    def save(self, clock: Attribution) -> dict[str, Any]:
        """Write the checkpoint and return its state; every rank takes part, the first one writes, the others return {}.

        Raises:
            TrainingError: A tensor is not finite; nothing is written.
        """
        tensors, state = self.checkpoint(clock)
        if not self.ranks.is_first:
            return {}
        refuse_non_finite(tensors, self.global_step, self.run)
        series = {SERIES_FILE: self.series.to_bytes()}
        return save_checkpoint(self.run.output, tensors, state, self.run.vocabulary_files, series)

    def _state(self, clock: Attribution) -> dict[str, Any]:
        run, perf = self.run, clock.metrics()
        metrics: dict[str, Any] = {"train/loss": self.mean_loss}
        metrics |= self.dense.rates.metrics("dense") | self.sparse.rates.metrics("sparse")
        for name, found in zip(self.supervised, self.ranks.total(self.metrics).compute(), strict=True):
            metrics |= {
                f"train/auc/{name}": found.auc,
                f"train/auc_error/{name}": found.certificate,
                f"train/ne/{name}": found.ne,
                f"train/calibration/{name}": found.calibration,
                f"train/clipped/{name}": found.clipped,
                f"train/count/{name}": found.count,
            }
        return {
            "step": self.global_step,
            "rng": {"seed": run.seed, "step": self.global_step},
            "cursor": {"batch": self.cursor, "batches": len(self.reader)},
            "watermark": self.reader.index["bound"],
            "newest_supervised_us": self.ranks.latest(self.newest, self.supervised),
            "vocabulary": {
                "version": run.vocabulary_version or self.reader.index["vocabulary"],
                "tables": {
                    t.name: {
                        "rows": t.rows,
                        "capacity": t.capacity,
                        "known_rows": t.rows,
                        "fallbacks": t.fallbacks,
                    }
                    for t in self.tables.specs
                },
            },
            "fingerprint": run.fingerprint,
            "parent": str(run.parent) if run.parent else None,
            "parent_digest": self.parent_state["digest"] if self.parent_state else None,
            "seed": run.seed,
            "ranks": self.ranks.describe(),
            "attention": self.attention.kernel,
            "config": dict(run.config),
            "actions": self.actions,
            "supervised": self.supervised,
            "supervised_mask": self.reader.index["supervised"],
            "pack_digest": self.reader.digest,
            "metrics": metrics
            | {"perf/save_seconds": self.save_seconds}
            | perf
            | self.compilation.metrics()
            | memory_metrics(run, self.reader.index),
            "advice": advise(perf, run.config, nodes=nodes_of(run, self.device)),
        }
