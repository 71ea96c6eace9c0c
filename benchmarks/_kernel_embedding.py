"""`embedding`: lookup of all tables in one launch, and their merged update, beside torch's operators on the same ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._figures import Figure, Report
from benchmarks._kernel_timing import Machine, error, generator
from kernels.embedding import Layout, lookup_tables, update_tables

FEATURES, WIDTH = 8, 64
ROWS, BAGS = 4_200_000, 131_072
"""Rows of each table: 8.6 GB in fp32, far over any cache; and bags of one step."""
LEARNING_RATE, EPS = 0.01, 1e-8
MIN_BANDWIDTH = 0.6
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def measure_embedding(report: Report, machine: Machine) -> None:
    """Add embedding/*: lookup and update against the reference, then their times, with uniform and with Zipf's ids."""
    if sum(_is_right(report, machine, dtype) for dtype in _TOLERANCE) < len(_TOLERANCE):
        return
    rows, bags = (ROWS, BAGS) if not machine.quick else (100, 64)
    layout = _layout(machine, rows)
    weight = torch.empty(FEATURES * rows, WIDTH, device=machine.device).uniform_(-0.1, 0.1)
    state = torch.zeros(FEATURES * rows, device=machine.device)
    for name in ("uniform", "zipf"):
        ids = _ids(machine, rows, bags, zipf=name == "zipf")
        _time_lookup(report, machine, name, weight, ids, layout)
        _time_update(report, machine, name, weight, state, ids, layout)


def _layout(machine: Machine, rows: int) -> Layout:
    return Layout.of([rows * f for f in range(FEATURES)], [rows] * FEATURES, device=machine.device)


def _ids(machine: Machine, rows: int, bags: int, *, zipf: bool = False) -> Tensor:
    """Return [B, F] int64 in [3, rows): no pad, unknown or fallback row; by Zipf's law rank k is as likely as 1 / k."""
    share = torch.rand(bags, FEATURES, generator=generator(machine), device=machine.device, dtype=torch.float64)
    if zipf:
        share = (torch.exp(share * torch.log(torch.tensor(float(rows - 3)))) - 1) / (rows - 3)
    return 3 + (share * (rows - 3)).long().clamp(max=rows - 4)


def _is_right(report: Report, machine: Machine, dtype: torch.dtype) -> bool:
    rows, bags = 50, 129
    layout, ids = _layout(machine, rows), _ids(machine, rows, bags, zipf=True)
    random = generator(machine)
    weight = torch.randn(FEATURES * rows, WIDTH, generator=random, device=machine.device)
    grad = torch.randn(bags, WIDTH, generator=random, device=machine.device)
    found = []
    for impl in ("triton", "reference"):
        mine, state = (
            weight.to(dtype if impl == "triton" else torch.float32),
            torch.ones(len(weight), device=machine.device),
        )
        if impl == "reference":
            mine = weight.to(dtype).float()
        out = lookup_tables(mine, ids, layout, out_dtype=torch.float32, impl=impl)  # type: ignore[arg-type]
        mine = mine.clone()
        update_tables(mine, state, grad, ids, layout, learning_rate=LEARNING_RATE, eps=EPS, impl=impl)  # type: ignore[arg-type]
        found.append((out, mine, state))
    kind, most = str(dtype).removeprefix("torch."), _TOLERANCE[dtype]
    right = True
    for name, ours, wanted in zip(("lookup", "rows", "accumulators"), *found, strict=True):
        apart = error(ours, wanted)
        report.figures[f"embedding/{kind}/{name}_error"] = Figure(value=apart, unit="of the largest", at_most=most)
        right &= apart <= most
    return right


def _time_lookup(report: Report, machine: Machine, name: str, weight: Tensor, ids: Tensor, layout: Layout) -> None:
    flat = ids + layout.tables[:, 0]
    seconds = machine.seconds(lambda: lookup_tables(weight, ids, layout, impl="triton"))
    torch_seconds = machine.seconds(lambda: F.embedding_bag(flat, weight, mode="sum"))
    moved = ids.numel() * (8 + 4 * WIDTH) + ids.shape[0] * 4 * WIDTH
    goal = MIN_BANDWIDTH if name == "uniform" and not machine.quick else None  # hot rows come from the cache
    report.figures[f"embedding/{name}/lookup_microseconds"] = Figure(
        value=1e6 * seconds, unit="us", baseline=1e6 * torch_seconds
    )
    report.figures[f"embedding/{name}/lookup_bandwidth_fraction"] = Figure(
        value=machine.fraction(moved, seconds), unit="of a copy's bytes/s", at_least=goal
    )


def _time_update(
    report: Report, machine: Machine, name: str, weight: Tensor, state: Tensor, ids: Tensor, layout: Layout
) -> None:
    grad = torch.randn(ids.shape[0], WIDTH, generator=generator(machine), device=machine.device)
    flat = (ids + layout.tables[:, 0]).flatten()

    def by_torch() -> None:
        rows, place = torch.unique(flat, return_inverse=True)
        merged = grad.new_zeros(len(rows), WIDTH).index_add_(0, place, grad.repeat_interleave(FEATURES, 0))
        state[rows] += merged.square().mean(1)
        weight.index_add_(0, rows, merged / (state[rows].sqrt() + EPS)[:, None], alpha=-LEARNING_RATE)

    seconds = machine.seconds(
        lambda: update_tables(weight, state, grad, ids, layout, learning_rate=LEARNING_RATE, eps=EPS, impl="triton")
    )
    torch_seconds = machine.seconds(by_torch)
    distinct = int(torch.unique(flat).numel())
    moved = ids.numel() * (8 + 4 * WIDTH) + distinct * 2 * (4 * WIDTH + 4)
    goal = MIN_BANDWIDTH if name == "uniform" and not machine.quick else None
    report.figures[f"embedding/{name}/update_microseconds"] = Figure(
        value=1e6 * seconds, unit="us", baseline=1e6 * torch_seconds
    )
    report.figures[f"embedding/{name}/update_bandwidth_fraction"] = Figure(
        value=machine.fraction(moved, seconds), unit="of a copy's bytes/s", at_least=goal
    )
    report.conditions[f"embedding/{name}"] = {"ids": ids.numel(), "distinct": distinct, "weight_bytes": weight.nbytes}
