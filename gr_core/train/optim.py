"""Optimizers and the night's learning-rate schedule, which drives both of them.

Dense parameters: AdamW. Table rows: rowwise Adagrad on the rows that a step touched, duplicates merged over all its
micro-batches, applied once a step, or inside the backward pass (`train.sparse_update`). Both keep their state by name, so
that a checkpoint is read without pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from gr_core.errors import FormatError
from gr_core.model.embeddings import Tables
from gr_core.train.settings import TrainConfig

_ELEMENTS_FOR_THREADS = 2**20  # measured on two cores


def schedule(step: int, steps: int, config: TrainConfig) -> float:
    """Return the share of the peak learning rate at a step of the night.

    Rises linearly over the warm-up and reaches 1 at its last step, then falls along a cosine to `final_fraction` at
    the night's last step. It restarts every night; the lineage's step count has no part in it.

    Args:
        step: Step of the night, from 0.
        steps: Steps of the night.
        config: Warm-up and final fraction.
    """
    warmup = math.ceil(config.warmup_fraction * steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup + 1) / max(steps - warmup, 1)
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(slots=True)
class Rates:
    """The learning rates that an optimizer moved at, in one night; None before its first step."""

    first: float | None = None
    peak: float | None = None
    last: float | None = None

    def add(self, rate: float) -> None:
        """Note the rate of one step."""
        self.first = rate if self.first is None else self.first
        self.peak = rate if self.peak is None else max(self.peak, rate)
        self.last = rate

    def metrics(self, name: str) -> dict[str, float | None]:
        """Return train/learning_rate/<name>/{first, peak, last}."""
        return {f"train/learning_rate/{name}/{key}": getattr(self, key) for key in ("first", "peak", "last")}


@contextmanager
def _threads_for(num_elements: int) -> Iterator[None]:
    """Run element-wise work on few parameters in this thread: a second one is woken for each, which takes longer."""
    threads = torch.get_num_threads()
    if threads == 1 or not 0 < num_elements < _ELEMENTS_FOR_THREADS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class DenseOptimizer:
    """AdamW over a model's parameters, its state by parameter name; weight decay on matrices only."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._owners = dict(model.named_parameters())
        self.parameters = {name: own_part(parameter) for name, parameter in self._owners.items()}
        matrices = [p for p in self.parameters.values() if p.dim() >= 2]
        others = [p for p in self.parameters.values() if p.dim() < 2]
        self._num_elements = sum(p.numel() for p in self.parameters.values() if p.device.type == "cpu")
        self.peak = config.dense_learning_rate
        self.clip_norm = config.clip_norm
        self.rates = Rates()
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.peak,
            betas=(0.9, config.beta2),
            fused=True if config.fused_optimizer else None,
        )
        for parameter in self.parameters.values():
            # present from the start, so that a checkpoint has the same tensors whether or not anything was due
            self._adamw.state[parameter] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if config.fused_optimizer else "cpu"
                ),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._owners.values():
            parameter.grad = None

    def norm(self) -> Tensor:
        """Return the total norm of the gradients that this rank holds, a scalar; non-finite when any entry is."""
        for name, parameter in self._owners.items():
            if parameter.grad is not None:
                self.parameters[name].grad = own_part(parameter.grad)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) if grads else torch.zeros(())

    def step(self, factor: float, norm: Tensor) -> None:
        """Clip by the given total norm and move the parameters at `factor` of the peak learning rate."""
        self.rates.add(self.peak * factor)
        for group in self._adamw.param_groups:
            group["lr"] = self.peak * factor
        with _threads_for(self._num_elements):
            if self.clip_norm:
                scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], scale)
            self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Return optimizer.dense.<param>.{exp_avg, exp_avg_sq, step}."""
        return {
            f"optimizer.dense.{name}.{key}": self._adamw.state[parameter][key]
            for name, parameter in self.parameters.items()
            for key in ("exp_avg", "exp_avg_sq", "step")
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a parent's state, step count included.

        Raises:
            FormatError: A tensor is missing or has another shape.
        """
        copy_tensors(self.state(), tensors)


class SparseOptimizer:
    """Rowwise Adagrad over the tables. Pad rows have no gradient and stay zero."""

    def __init__(self, tables: Tables, config: TrainConfig) -> None:
        self._tables = tables
        self._peak = config.sparse_learning_rate
        self._decay = config.accumulator_decay
        self.rates = Rates()
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._is_pad = torch.zeros(tables.map.num_rows, dtype=torch.bool, device=tables.weight.device)
        self._is_pad[torch.from_numpy(tables.map.pad_rows()).to(tables.weight.device)] = True

    def forget(self) -> None:
        """Multiply every row's state by `train.accumulator_decay`, once a night, before its first step."""
        if self._decay != 1.0:
            self._tables.accumulator.mul_(self._decay)

    def watch(self, rows_U: Tensor, values_UD: Tensor, loss: Tensor, factor: float) -> None:
        """Be told of a micro-batch before its backward pass; here nothing happens before the step."""

    def collect(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        """Keep a micro-batch's gradient: distinct rows [U] int64, gradients [U, D]."""
        self._parts.append((rows_U, self._without_pad(rows_U, grad_UD)))

    def _without_pad(self, rows_U: Tensor, grad_UD: Tensor) -> Tensor:
        return grad_UD.masked_fill(self._is_pad[rows_U][:, None], 0.0)

    def finite(self) -> Tensor:
        """Return a bool scalar: every collected gradient is finite."""
        sums = [grad.sum() for _, grad in self._parts]
        return torch.isfinite(torch.stack(sums)).all() if sums else torch.ones((), dtype=torch.bool)

    def zero_grad(self) -> None:
        """Forget the collected gradients."""
        self._parts.clear()

    def step(self, factor: float) -> None:
        """Merge what was collected and update each touched row once, at `factor` of the peak learning rate."""
        if self._parts:
            rows, grad = self._tables.merge(self._parts)
            learning_rate = self._peak * factor
            self.rates.add(learning_rate)
            self._tables.update(rows, grad, learning_rate)
        self.zero_grad()


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that FSDP2 spreads over ranks; any other tensor as it is."""
    local: Tensor = tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor
    return local


class BackwardSparseOptimizer(SparseOptimizer):
    """Rowwise Adagrad inside the backward pass: the host launches it without having waited for the device.

    Rows are written as soon as every gradient of the micro-batch is there, after a check on the device: where the loss or
    any gradient, dense or sparse, is not finite, what is added to rows and state is zero, and the step that follows stops.
    That asks for one micro-batch a step (config refuses more), and for clipping of dense parameters alone, whose factor is
    known only later. Results equal SparseOptimizer's bit for bit.
    """

    def __init__(self, tables: Tables, model: nn.Module, config: TrainConfig) -> None:
        super().__init__(tables, config)
        self._parameters = list(model.parameters())
        self._hook: RemovableHandle | None = None
        self._finite = torch.ones((), dtype=torch.bool)

    def watch(self, rows_U: Tensor, values_UD: Tensor, loss: Tensor, factor: float) -> None:
        """Update the rows [U] of values [U, D] in the backward pass that follows, at `factor` of the peak rate."""
        scalar = loss.detach()

        @torch.no_grad()
        def update(grads: Sequence[Tensor | None]) -> None:
            *dense, grad_UD = grads
            assert grad_UD is not None
            norms = torch._foreach_norm([grad for grad in dense if grad is not None])
            checked = torch.stack([scalar.float(), grad_UD.sum(), *norms])
            self._finite = torch.isfinite(checked).all()
            safe_UD = torch.where(self._finite, self._without_pad(rows_U, grad_UD), 0.0)
            learning_rate = self._peak * factor
            self._tables.update(rows_U, safe_UD, learning_rate)

        self._hook = register_multi_grad_hook([*self._parameters, values_UD], update)

    def collect(self, rows_U: Tensor, grad_UD: Tensor) -> None:
        """End the watch: the backward pass is over."""
        assert self._hook is not None
        self._hook.remove()

    def finite(self) -> Tensor:
        """Return a bool scalar: what the backward pass found; where it is False no row was moved."""
        return self._finite

    def step(self, factor: float) -> None:
        """Note the rate; the rows have moved."""
        self.rates.add(self._peak * factor)


def new_sparse_optimizer(tables: Tables, model: nn.Module, config: TrainConfig) -> SparseOptimizer:
    """Return the optimizer of the tables, as `train.sparse_update` says."""
    in_backward = config.sparse_update == "backward"
    return BackwardSparseOptimizer(tables, model, config) if in_backward else SparseOptimizer(tables, config)


@torch.no_grad()
def copy_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy `given` into `own` by name.

    Raises:
        FormatError: A tensor is missing or has another shape; names it.
    """
    for name, tensor in own.items():
        if name not in given or given[name].shape != tensor.shape:
            found = tuple(given[name].shape) if name in given else "nothing"
            raise FormatError(
                f"checkpoint tensor {name} must have shape {tuple(tensor.shape)}, found {found}; "
                "a change of the model is a full retrain",
                where=name,
            )
        tensor.copy_(given[name])
