"""What ranks send: bytes a step inside a group of near ranks and across, under FSDP (1 x 4) and HSDP (2 x 2).

Counted, not timed: four ranks with gloo on one machine take steps of the product's night, and every collective operation
that passes torch's dispatcher is noted with its group and size. Near are ranks 0 and 1, and 2 and 3, as two machines of
two GPUs have them. Reductions and gathers go round a ring of the group in order of rank, as NCCL's do: of N bytes in all
each rank hands (g - 1) / g on to the next, twice for an all-reduce; all-to-all counts what each rank has for each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _ours
from benchmarks._figures import Figure, Report
from gr_core.train.distributed import Ranks, join
from gr_core.train.layout import DistributedConfig
from gr_core.train.loop import Night
from gr_core.train.run import read_run

LAYOUTS = {
    "fsdp_1x4": DistributedConfig(strategy="hsdp", shard=4),
    "hsdp_2x2": DistributedConfig(strategy="hsdp", replicate=2, shard=2),
    "ddp_4": DistributedConfig(strategy="ddp", replicate=4),
}
RANKS, NEAR = 4, 2
TOKEN_BUDGET = 2048
# a ring hands on this many times the operation's bytes, (g - 1) / g of them each time
_ROUNDS = {"allgather": 1, "reduce_scatter": 1, "allreduce": 2}


@dataclass(slots=True)
class Sent:
    """Bytes of all ranks a step."""

    inside: float = 0.0
    across: float = 0.0
    tables_inside: float = 0.0
    """Of `inside`: rows, their values and gradients."""
    tables_across: float = 0.0


class Counted(TorchDispatchMode):
    """Adds up what this rank sends while it is active.

    Args:
        rank: This rank.
        near: Ranks of a machine.
    """

    def __init__(self, rank: int, near: int) -> None:
        super().__init__()
        self.rank, self.near = rank, near
        self.inside = self.across = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective operation, and run it."""
        if func.namespace == "c10d":
            self._note(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        ranks = dist.get_process_group_ranks(group)
        if "alltoall" in name:
            sent = _tensors(args[1])[0]
            sizes = args[4] or [len(sent) // len(ranks)] * len(ranks)
            row = sent.nbytes / max(len(sent), 1)
            for other, size in zip(ranks, sizes, strict=True):
                self._add(other, size * row)
            return
        kind = next((kind for kind in _ROUNDS if kind in name), None)
        if kind is not None and len(ranks) > 1:
            whole = max(sum(each.nbytes for each in _tensors(value)) for value in args[:2])
            following = ranks[(ranks.index(self.rank) + 1) % len(ranks)]
            self._add(following, _ROUNDS[kind] * whole * (len(ranks) - 1) / len(ranks))

    def _add(self, other: int, size: float) -> None:
        if other != self.rank and other // self.near == self.rank // self.near:
            self.inside += size
        elif other != self.rank:
            self.across += size


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an operation's argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for each in _flat(value) if isinstance(each, torch.Tensor)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def measure_links(report: Report, work: Path, *, steps: int = 3, width: int = 256, layers: int = 4) -> None:
    """Add the bytes a step of each layout, and HSDP's share of what FSDP sends across, which is to be below 1.

    Args:
        report: Takes the figures.
        work: A folder for the pack.
        steps: Steps that are counted, after one that is not.
        width: The model's.
        layers: The model's.
    """
    found = sent_by_layout(work, steps=steps, width=width, layers=layers)
    for name, sent in found.items():
        for key, value in asdict(sent).items():
            report.figures[f"links/{name}/{key}_bytes"] = Figure(value=value, unit="bytes/step")
    report.figures["links/across_share_of_fsdp"] = Figure(
        value=found["hsdp_2x2"].across / found["fsdp_1x4"].across, unit="of FSDP's bytes", at_most=1.0
    )
    report.conditions["links"] = {"ranks": RANKS, "near": NEAR, "width": width, "layers": layers, "steps": steps}


def sent_by_layout(work: Path, *, steps: int, width: int, layers: int) -> dict[str, Sent]:
    """Start the ranks, and return what each layout sends a step.

    Raises:
        RuntimeError: A rank failed; the end of what it said.
    """
    pack = _ours.pack_of(work / "links", "ads", TOKEN_BUDGET * RANKS * (steps + 2), token_budget=TOKEN_BUDGET)
    for name, layout in LAYOUTS.items():
        _write_run(work / f"RUN-{name}.json", pack, layout, width, layers)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *torchrun, "-m", "benchmarks._links", str(work), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the ranks failed: {done.stderr[-2000:]}")
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {name: Sent(**values) for name, values in told.items()}


def _write_run(path: Path, pack: Path, layout: DistributedConfig, width: int, layers: int) -> None:
    counts = {name: _ours.RESERVED + count for name, count in _ours.ROWS.items()}
    model = {"width": width, "num_layers": layers, "item_features": _ours.ITEM_FEATURES}
    train = {"num_threads": 1, "micro_batches": RANKS, "distributed": asdict(layout)}
    values = {
        "packs": {"train": pack.name},
        "vocabulary": {name: {"rows": count, "capacity": count} for name, count in counts.items()},
        "output": f"checkpoint-{path.stem}",
        "config": {"model": {**model, "context_features": _ours.CONTEXT_FEATURES}, "train": train},
        "fingerprint": "sha256:benchmark",
        "resume": False,
    }
    path.write_text(json.dumps(values), encoding="utf-8")


def count(run: Path, ranks: Ranks, steps: int) -> Sent:
    """Take steps as one of the ranks, and return what all of them send a step; dense and table traffic counted apart."""
    night = Night(read_run(run), ranks)
    clock = night.clock(steps + 1)
    tables = Counted(ranks.rank, NEAR)
    for name in ("read", "merge"):
        setattr(night.tables, name, _under(tables, getattr(night.tables, name)))
    groups = [list(range(first, first + RANKS)) for first in range(0, (steps + 1) * RANKS, RANKS)]
    night.step(groups[0], 1.0, clock)
    tables.inside = tables.across = 0.0
    with Counted(ranks.rank, NEAR) as every:
        for numbers in groups[1:]:
            night.step(numbers, 1.0, clock)
    own = torch.tensor([every.inside, every.across, tables.inside, tables.across], dtype=torch.float64)
    dist.all_reduce(own)
    return Sent(*(own / steps).tolist())


def _under(mode: Counted, function: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        with mode:
            return function(*arguments)

    return counted


def main() -> None:
    """Be one of the ranks; the first prints what each layout sends."""
    work, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, layout in LAYOUTS.items():
        ranks = join(layout, torch.device("cpu"), "gloo")
        found[name] = asdict(count(work / f"RUN-{name}.json", ranks, steps))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
