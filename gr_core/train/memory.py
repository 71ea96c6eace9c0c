"""What a training step takes of a rank's memory, without taking it; and the token budget that fits a given memory.

A step of the run's own model is run on fake tensors, which have shapes and no storage, for two batches of different size
whose segments are as long as the config allows and whose ids are all different; what lives at the worst moment is counted
storage by storage. Between the two sizes memory is a line. Shorter segments and repeated ids take less, so the budget is on
the safe side. Attention is counted as on the CPU, length-bucketed with masks, as histories with events of one moment need
them: plainly causal histories and FlexAttention take less.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gr_core.errors import ConfigError
from gr_core.model.embeddings import RowMap, TableSpec
from gr_core.model.inputs import InputBuilder, Inputs
from gr_core.model.losses import batch_loss, token_losses
from gr_core.model.recommender import Recommender
from gr_core.model.settings import ModelConfig
from gr_core.train.compute import example_batch, execution_of
from gr_core.train.run import Run
from gr_core.train.settings import TrainConfig

GIB = 2**30
# Of a process that has imported torch (0.35 GiB on the CPU) or holds a CUDA context (0.5 GiB), and what malloc keeps.
RUNTIME_BYTES = 3 * GIB // 4
# Over what lives at the worst moment: an allocator keeps pieces that nothing fits into, and bf16 kernels on the CPU copy
# their operands into another order. `python -m benchmarks.training --only memory` lets no peak be above the model.
SLACK = {"fp32": 1.25, "bf16": 1.5}
# Batches of inputs at once: the one in use and those read ahead of it.
BATCHES_OF_INPUTS = 3
_ROUND = 64  # tokens; budgets are multiples of it
_SEGMENTS = (2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained, as far as memory goes."""

    model: ModelConfig
    train: TrainConfig
    num_actions: int
    num_supervised: int
    rows: Mapping[str, int]
    """Rows of each table."""
    max_history: int
    """History tokens of the longest segment."""
    max_targets: int
    """Target tokens of the longest segment."""

    @property
    def segment_tokens(self) -> int:
        """Tokens of the longest segment: the smallest budget."""
        return self.max_history + self.max_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of a rank: fixed + per_token x tokens of a batch."""

    fixed: int
    """Process, tables, dense parameters, both optimizers' states."""
    per_token: float
    """Inputs, activations, gradients."""

    def total(self, tokens: int) -> int:
        """Return the bytes of a step over so many tokens a batch."""
        return math.ceil(self.fixed + self.per_token * tokens)


def count_parameters(
    model: ModelConfig, *, num_actions: int, num_supervised: int, rows: Mapping[str, int]
) -> dict[str, int]:
    """Return how many parameters a model has, {embedding, dense}; nothing is allocated.

    Args:
        model: Its shape.
        num_actions: All actions.
        num_supervised: Supervised ones.
        rows: Rows of each table.
    """
    with torch.device("meta"):
        dense = Recommender(model, num_actions, num_supervised)
    total = sum(rows[name] for name in model.features) * model.width
    return {"embedding": total, "dense": sum(p.numel() for p in dense.parameters())}


def step_memory(work: Workload) -> StepMemory:
    """Model the memory of a training step on one rank."""
    few, many = ((count * work.segment_tokens, _step_bytes(work, count)) for count in _SEGMENTS)
    per_token = (many[1] - few[1]) / (many[0] - few[0])
    counts = count_parameters(
        work.model, num_actions=work.num_actions, num_supervised=work.num_supervised, rows=work.rows
    )
    shard = work.train.distributed.shard
    num_rows = sum(work.rows[name] for name in work.model.features) / shard
    table_bytes = num_rows * (4 * work.model.width + 4 + 1)  # weight, accumulator, pad mark
    dense_bytes = counts["dense"] * 16 / shard  # weight, gradient, both moments
    if shard > 1:
        dense_bytes += counts["dense"] * 8 / work.model.num_layers  # a block's weights and gradients, whole
    return StepMemory(
        fixed=math.ceil(RUNTIME_BYTES + table_bytes + dense_bytes), per_token=SLACK[work.train.precision] * per_token
    )


def fit_token_budget(work: Workload) -> tuple[int, StepMemory]:
    """Return the largest token budget whose step fits `train.memory_gib`, and what it was found from.

    Raises:
        ConfigError: Not even one longest segment fits, or no memory is given; names the smallest that works.
    """
    memory = step_memory(work)
    least = -(-work.segment_tokens // _ROUND) * _ROUND
    smallest = math.ceil(100 * memory.total(least) / GIB) / 100
    given = work.train.memory_gib
    if given is None:
        raise ConfigError(
            'pack.token_budget = "auto" needs train.memory_gib, the memory of one rank; set it (at least '
            f"{smallest:.2f} for this model and these tables), or give a number of tokens",
            where="train.memory_gib",
        )
    tokens = int((given * GIB - memory.fixed) / memory.per_token) // _ROUND * _ROUND
    if tokens < least:
        raise ConfigError(
            f"train.memory_gib = {given:g} holds no batch of one segment of {work.segment_tokens} tokens "
            f"(sequences.max_history + max_targets): tables, parameters and the process take {memory.fixed / GIB:.2f} GiB, "
            f"a token {memory.per_token / 1024:.0f} KiB; the smallest that works is {smallest:.2f}, less with "
            'train.activation_checkpointing = "block" or train.precision = "bf16"',
            where="train.memory_gib",
        )
    return min(tokens, 2**30), memory


def modelled_bytes(run: Run, index: Mapping[str, Any]) -> int:
    """Return what a run's step counts on, at its pack's token budget; RUN.json must have config.sequences."""
    limits, events = run.config["sequences"], 2 if index["tokens"] == "interleaved" else 1
    work = Workload(
        model=run.model,
        train=run.train,
        num_actions=len(index["actions"]),
        num_supervised=int(index["supervised"]).bit_count(),
        rows={spec.name: spec.rows for spec in run.tables},
        max_history=events * int(limits["max_history"]),
        max_targets=events * int(limits["max_targets"]),
    )
    return step_memory(work).total(int(index["token_budget"]))


def _step_bytes(work: Workload, num_segments: int) -> int:
    """Return the most bytes that live at once in a step, parameters and tables aside; of use is how they grow."""
    with FakeTensorMode() as mode:
        model = Recommender(work.model, work.num_actions, work.num_supervised)
    execution_of(replace(work.train, compile="off")).apply(model.train())
    inputs = _inputs(work, num_segments)
    input_bytes = sum(t.untyped_storage().nbytes() for t in inputs.tensors())
    with mode:
        fake = inputs.map(mode.from_tensor)
        values = torch.empty(len(inputs.rows), work.model.width, requires_grad=True)
        action_weights = torch.ones(work.num_supervised)
        with _Live() as live:
            loss = batch_loss(
                token_losses(model(values, fake), fake.labels, fake.known, action_weights), fake.weights, 1.0
            )
            loss.backward()  # type: ignore[no-untyped-call]
    rows_bytes = 3 * values.numel() * 4  # the values, and the update that follows
    return int(live.peak + rows_bytes + BATCHES_OF_INPUTS * input_bytes)


def _inputs(work: Workload, num_segments: int) -> Inputs:
    """Return real inputs of the longest segments, every id another row."""
    batch = example_batch(work.model.features, [(work.max_history, work.max_targets)] * num_segments)
    batch.hi[(batch.supervise == 0) & (batch.position > 0)] -= 1  # no history is plainly causal
    number = torch.from_numpy(np.arange(2, batch.num_tokens + 2, dtype=np.int32))
    different = replace(batch, rows=dict.fromkeys(work.model.features, number))
    specs = [TableSpec(name=n, rows=batch.num_tokens + 2, capacity=batch.num_tokens + 2) for n in work.model.features]
    mask = (1 << work.num_supervised) - 1
    return InputBuilder(work.model, work.num_actions, mask, RowMap(specs)).build(different)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), given)
        return out

    def _add(self, storage: Any, given: set[int]) -> None:
        key, size = id(storage), int(storage.nbytes())
        if key in given or key in self._seen:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed(_: Any) -> None:
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
