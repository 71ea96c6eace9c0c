"""How a night computes: execution of the model as `train.*` says, and graphs compiled before the first batch."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gr_core.data.batches import Batch
from gr_core.errors import ConfigError
from gr_core.model.execution import Execution, graphs
from gr_core.model.inputs import InputBuilder
from gr_core.schema import pack_schema
from gr_core.train.run import Run
from gr_core.train.settings import TrainConfig
from kernels.choice import choose, prefer

logger = logging.getLogger(__name__)

# Of the batch that graphs are made from: no two dimensions are equal, lest a graph demand that they always are.
_WARM_LENGTHS = ((43, 31), (1, 22))


def execution_of(train: TrainConfig) -> Execution:
    """Return how a training's model runs."""
    return Execution(
        precision=train.precision, activation_checkpointing=train.activation_checkpointing, compile=train.compile
    )


def example_batch(features: Sequence[str], lengths: Sequence[tuple[int, int]]) -> Batch:
    """Return a batch of the given (history tokens, targets) a segment; every row is the pad row, every label 0 and known.

    Targets see the whole history of their segment.
    """
    sizes = [history + targets for history, targets in lengths]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    values = {f.name: np.zeros(starts[-1], f.type.to_pandas_dtype()) for f in pack_schema(list(features))}
    for begin, (history, targets) in zip(starts, lengths, strict=False):
        number = np.arange(history + targets)
        segment = slice(begin, begin + history + targets)
        values["position"][segment] = np.minimum(number, history)
        values["lo"][segment] = begin
        values["hi"][segment] = begin + np.minimum(number, history)
        values["supervise"][segment] = number >= history
    values["label_known"][:] = np.where(values["supervise"] == 1, np.iinfo(np.int32).max, 0)
    values["weight"][:] = 1
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    rows = {name: tensors.pop(name) for name in features}
    weights = {name: float(values["supervise"].sum()) for name in ("token", "segment", "event_weight")}
    return Batch(number=-1, rows=rows, **tensors, segment_starts=starts, weights=weights)


def use_kernels(train: TrainConfig, device: torch.device) -> None:
    """Make `train.kernels` what this process runs from now on; raises as `check_kernels` does."""
    check_kernels(train, device)
    prefer(train.kernels)


def check_kernels(train: TrainConfig, device: torch.device) -> None:
    """Refuse a `train.kernels` that cannot run on a device; raises ConfigError."""
    try:
        choose("training", train.kernels, torch.empty(0, device=device))
    except RuntimeError as error:
        raise ConfigError(
            f"train.kernels = {train.kernels!r} cannot be met: {error} (in the config: train.kernels = 'reference')",
            where="train.kernels",
        ) from error


class Compilation:
    """Graphs of a night, made before its first batch by one forward and backward; every rank makes its own.

    Args:
        model: The model, as the night calls it; gradients that it has are forgotten.
        builder: Makes the inputs.
        features: Feature columns of the pack.
        train: The night's settings; nothing is done where `train.compile` is off.
    """

    def __init__(self, model: nn.Module, builder: InputBuilder, features: Sequence[str], train: TrainConfig) -> None:
        self._is_on = train.compile != "off"
        began = time.perf_counter()
        if self._is_on:
            device = next(model.parameters()).device
            inputs = builder.build(example_batch(features, _WARM_LENGTHS)).to(device)
            values = torch.zeros(len(inputs.rows), builder.config.width, device=device, requires_grad=True)
            model.train()
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "The .grad attribute of a Tensor that is not a leaf"
                )  # torch asks itself
                logits: Tensor = model(values, inputs)
                logits.sum().backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
        self._seconds = time.perf_counter() - began
        if self._is_on:
            logger.info("torch.compile: %s", self.metrics())

    def metrics(self) -> dict[str, float]:
        """Return perf/compile/*: seconds of the start, graphs, and what the disk cache had and lacked; {} where off.

        A start without a miss is warm. More than three graphs say that batches made new ones.
        """
        if not self._is_on:
            return {}
        counts = {f"perf/compile/{name}": float(value) for name, value in graphs().items()}
        return {"perf/compile/seconds": self._seconds, **counts}


def memory_metrics(run: Run, index: Mapping[str, Any]) -> dict[str, float]:
    """Return perf/token_budget, and where train.memory_gib is given, perf/modelled_bytes: what a step counts on."""
    found = {"perf/token_budget": float(index["token_budget"])}
    if run.train.memory_gib is not None and "sequences" in run.config:
        from gr_core.train.memory import modelled_bytes  # its import takes a second, and few runs ask

        found["perf/modelled_bytes"] = float(modelled_bytes(run, index))
    return found
