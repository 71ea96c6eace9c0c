"""The ranks of a training: one process, or several that torchrun started, behind one interface.

A step's batches are the same whatever the number of ranks: the k-th supervised one goes to rank k % world, with random
draws that follow from its place in the step. All ranks take equally many turns, for every turn sends tensors; one that has
no batch left computes `blank_batch`, whose loss and gradients are exactly 0. Gradients are summed, never averaged: the
loss is divided by the weight of the whole step already.

ddp: torch's DistributedDataParallel. hsdp: FSDP2's fully_shard, a block at a time, on a (replicate, shard) mesh; tables
as gr_core.train.sharding says. A checkpoint is gathered on rank 0, so its files do not tell how many ranks there were.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gr_core.data.batches import TORCH_TYPES, Batch
from gr_core.errors import ConfigError, TrainingError
from gr_core.model.embeddings import Tables, TableSpec
from gr_core.schema import pack_schema
from gr_core.train.launch import is_launched
from gr_core.train.layout import DistributedConfig
from gr_core.train.run import Run
from gr_core.train.sharding import Links, ShardedTables, gather_all

logger = logging.getLogger(__name__)


class Counts(Protocol):
    """Metrics whose state is counts by name, each a sum over rows (gr_core.train.running_metrics)."""

    def state(self) -> dict[str, Tensor]:
        """Return the counts: views."""


M = TypeVar("M", bound=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """What a step came to, before any parameter moves: on one rank, or agreed on by all of them."""

    norm: Tensor
    """Gradient norm of the dense parameters, a scalar; non-finite where any gradient is."""
    loss: Tensor
    """Sum of weight times loss, a scalar, fp64."""
    weight: float
    """Sum of the weights."""
    bad_batch: int | None
    """The first batch whose loss is not finite."""

    def refuse_non_finite(
        self, run: Run, step: int, numbers: Sequence[int], last_good: Callable[[], Path | None]
    ) -> None:
        """Stop before a step that would spoil parameters.

        Args:
            run: The night's run.
            step: Of the lineage.
            numbers: The step's batches.
            last_good: Returns the newest checkpoint that the training can go on from.

        Raises:
            TrainingError: Names the step (of the lineage) and the batch; where only a gradient is bad, the step's batches.
        """
        if self.bad_batch is None and bool(torch.isfinite(self.norm)):
            return
        what = "gradient is" if self.bad_batch is None else "loss is"
        batch = f"batches {list(numbers)}" if self.bad_batch is None else f"batch {self.bad_batch}"
        raise TrainingError(
            f"{what} not finite at step {step}, {batch} of {run.pack}; no parameter was moved, the last good checkpoint is "
            f"{last_good()}",
            where=f"batch {numbers[0] if self.bad_batch is None else self.bad_batch}",
        )


class Ranks:
    """A single process: nothing is sent, every batch is its own.

    Args:
        device: Where it trains.
    """

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def close(self) -> None:
        """Leave the others when all are done. After an error there is no need: torchrun ends those that still wait."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: progress, checkpoints."""
        return self.rank == 0

    def mine(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return this rank's (place, batch number) of a step's supervised batches."""
        return [(place, numbers[place]) for place in range(self.rank, len(numbers), self.world)]

    def turns(self, count: int) -> int:
        """Return how many turns all ranks take for a step of so many supervised batches."""
        return -(-count // self.world)

    def new_tables(self, specs: Sequence[TableSpec], width: int, **settings: Any) -> Tables:
        """Return the tables, or this rank's part of them; settings as `Tables` has them."""
        return Tables(specs, width, **settings, device=self.device)

    def parallel(self, model: nn.Module) -> nn.Module:
        """Spread a model over the ranks, in place; returns what to call instead of it."""
        return model

    def turn(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward; gradients of dense parameters sum up after the last."""
        del last
        return nullcontext()

    def agree(self, end: StepEnd) -> StepEnd:
        """Return what the step came to over all ranks."""
        return end

    def is_agreed(self, *, yes: bool) -> bool:
        """Return what the first rank says."""
        return bool(self.told(int(yes)))

    def told(self, number: int) -> int:
        """Return the first rank's number."""
        return number

    def total(self, metrics: M) -> M:
        """Return metrics whose counts are the sums over the ranks; this rank's own are left as they are."""
        return metrics

    def latest(self, times: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
        """Return the largest value of each name over the ranks; names that no rank has are left out."""
        del names
        return dict(times)

    def pieces(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Cut a checkpoint's dense tensors to what this rank holds of them; tables are left as they are."""
        return tensors

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put dense tensors together as a checkpoint has them; every rank calls it, only the first one's result counts."""
        return dict(tensors)

    def describe(self) -> dict[str, Any]:
        """Return what state.json says of the ranks."""
        return {"world": 1, "strategy": "none", "replicate": 1, "shard": 1}


class _Group(Ranks):
    """One of several processes, in a (replicate, shard) mesh.

    Args:
        config: The mesh.
        device: This rank's.
        backend: What carries the tensors.
    """

    def __init__(self, config: DistributedConfig, device: torch.device, backend: str) -> None:
        # imported where it is used: costs a second, which a single process need not spend
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(device)
        self.config, self.backend = config, backend
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        names = ("replicate", "shard")
        self._mesh = init_device_mesh(device.type, (config.replicate, config.shard), mesh_dim_names=names)
        self._links = Links(shard=self._mesh.get_group("shard"), replicate=self._mesh.get_group("replicate"))
        self._sharded: dict[str, Any] = {}
        self._module: Any = None

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def new_tables(self, specs: Sequence[TableSpec], width: int, **settings: Any) -> Tables:
        return ShardedTables(specs, width, self._links, **settings, device=self.device)

    def parallel(self, model: nn.Module) -> nn.Module:
        self._module = self._ddp(model) if self.config.strategy == "ddp" else self._hsdp(model)
        parallel: nn.Module = self._module
        return parallel

    def _ddp(self, model: nn.Module) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        group = dist.group.WORLD
        wrapped = DistributedDataParallel(model, process_group=group)
        # torch compares a hook's annotations with its own classes, and ours are strings
        wrapped.register_comm_hook(group, lambda state, bucket: _sum_bucket(state, bucket))  # noqa: PLW0108
        return wrapped

    def _hsdp(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = self._mesh if self.config.replicate > 1 else self._mesh["shard"]
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        self._sharded = dict(model.named_parameters())
        return model

    @contextmanager
    def turn(self, *, last: bool) -> Iterator[None]:
        if self.config.strategy == "ddp":
            with nullcontext() if last else self._module.no_sync():
                yield
        else:
            self._module.set_requires_gradient_sync(last)
            yield

    def agree(self, end: StepEnd) -> StepEnd:
        bad = math.inf if end.bad_batch is None else float(end.bad_batch)
        own = torch.tensor([0.0, 0.0, end.weight, bad], dtype=torch.float64, device=self.device)
        own[0], own[1] = end.norm.double() ** 2, end.loss
        found = gather_all(own, dist.group.WORLD).view(self.world, -1)
        # every copy has the same gradients, each of its ranks a part of them under hsdp and all of them under ddp
        copies = self.config.replicate
        norm = (found[:, 0].sum() / copies).sqrt().to(end.norm.dtype)
        weight, first_bad = float(found[:, 2].sum()), float(found[:, 3].min())
        bad_batch = int(first_bad) if first_bad < math.inf else None
        return StepEnd(norm=norm, loss=found[:, 1].sum(), weight=weight, bad_batch=bad_batch)

    def told(self, number: int) -> int:
        said = torch.tensor([number], device=self.device)
        dist.broadcast(said, src=0)
        return int(said.item())

    def total(self, metrics: M) -> M:
        sums = copy.deepcopy(metrics)
        for tensor in sums.state().values():
            dist.all_reduce(tensor)
        return sums

    def latest(self, times: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
        never = -(2**62)
        largest = torch.tensor([times.get(name, never) for name in names], dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {name: time for name, time in zip(names, largest.tolist(), strict=True) if time > never}

    def pieces(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self._sharded:
            return tensors
        count, index = self._links.shard.size(), self._links.shard.rank()
        return {
            name: _piece(tensor, count, index) if self._parameter(name, tensor) is not None else tensor
            for name, tensor in tensors.items()
        }

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._sharded:
            return dict(tensors)
        from torch.distributed.tensor import DTensor

        found = {}
        for name, tensor in tensors.items():
            like = self._parameter(name, tensor)
            if like is not None:
                spread = DTensor.from_local(
                    tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
                )
                found[name] = spread.full_tensor().cpu()
            else:
                found[name] = tensor
        return found

    def _parameter(self, name: str, tensor: Tensor) -> Any:
        """Return the sharded parameter that a checkpoint's tensor is of or belongs to; None for step counts and tables."""
        if name.startswith("dense."):
            return self._sharded.get(name.removeprefix("dense."))
        if name.startswith("optimizer.dense.") and tensor.dim():
            return self._sharded.get(name.removeprefix("optimizer.dense.").rpartition(".")[0])
        return None

    def describe(self) -> dict[str, Any]:
        config = self.config
        return {
            "world": self.world,
            "strategy": config.strategy,
            "replicate": config.replicate,
            "shard": config.shard,
            "backend": self.backend,
        }


def device_of(name: str) -> torch.device:
    """Return the device that RUN.json names; auto: CUDA where there is one."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def connect(config: DistributedConfig, device: str) -> Ranks:
    """Join the other ranks of a training, where it has any.

    Args:
        config: How many there are, and what each of them holds.
        device: auto, cpu, cuda: RUN.json's.

    Raises:
        ConfigError: Not started as the config says, or a backend that the device cannot be used with.
    """
    kind = device_of(device)
    if config.ranks == 1:
        return Ranks(kind)
    if not is_launched():
        raise ConfigError(
            f"train.distributed asks for {config.replicate} x {config.shard} ranks, this is one process; start it as "
            "`python -m gr_core.train RUN.json`, or on several machines under torchrun",
            where="train.distributed",
        )
    backend = config.backend if config.backend != "auto" else "nccl" if kind.type == "cuda" else "gloo"
    if backend == "nccl" and kind.type != "cuda":
        raise ConfigError(
            f"train.distributed.backend must be gloo on {kind.type}, got 'nccl'; set auto",
            where="train.distributed.backend",
        )
    if kind.type == "cuda":
        kind = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(kind)
    dist.init_process_group(backend)
    if dist.get_world_size() != config.ranks:
        raise ConfigError(
            f"train.distributed asks for replicate x shard = {config.replicate} x {config.shard} ranks, torchrun started "
            f"{dist.get_world_size()}; make the two equal",
            where="train.distributed",
        )
    ranks = join(config, kind, backend)
    logger.info("rank %d of %d on %s: %s over %s", ranks.rank, ranks.world, kind, config.strategy, backend)
    return ranks


def join(config: DistributedConfig, device: torch.device, backend: str) -> Ranks:
    """Return the ranks of a process group that is there already, of config.ranks processes."""
    return _Group(config, device, backend)


def blank_batch(features: Sequence[str]) -> Batch:
    """Return a batch of one history token and one target that has no known label: its loss and gradients are 0.

    Args:
        features: Feature columns of the pack; both tokens have the pad row.
    """
    tensors = {field.name: torch.zeros(2, dtype=TORCH_TYPES[field.type]) for field in pack_schema(list(features))}
    tensors["hi"][1] = tensors["position"][1] = tensors["supervise"][1] = 1
    rows = {name: tensors.pop(name) for name in features}
    return Batch(
        number=-1,
        rows=rows,
        **tensors,
        segment_starts=np.array([0, 2], np.int64),
        weights=dict.fromkeys(("token", "segment", "event_weight"), 0.0),
    )


def _sum_bucket(group: Any, bucket: Any) -> Any:
    """Sum a bucket of gradients over the ranks; torch's own hook would average them."""
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _piece(whole: Tensor, count: int, index: int) -> Tensor:
    """Return a rank's part along the first dimension, as FSDP2 cuts it: like torch.chunk, with empty ones at the end."""
    size = -(-whole.shape[0] // count)
    return whole[size * index : size * (index + 1)]
