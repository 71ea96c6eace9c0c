"""`bucketed_auc` beside torch on the device and the way through the host."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks._figures import Figure, Report
from benchmarks._kernel_timing import Machine, error, generator
from kernels.bucketed_auc import BucketedAUC

ACTIONS = 4
SMALL, LARGE = 2**20, 2**26
"""Scores: rows times actions."""
MIN_BANDWIDTH, MAX_LAUNCHES, MIN_OVER_HOST = 0.6, 3.0, 80.0
_BYTES = 4 + 1 + 1  # of a score: logit, label, known


def scores(machine: Machine, count: int, *, skewed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [N, A] fp32, labels and known [N, A] bool; skewed: nearly all logits fall in one bin."""
    random = generator(machine)
    shape = (count // ACTIONS, ACTIONS)
    logits = torch.randn(shape, generator=random, device=machine.device)
    if skewed:
        logits = torch.where(logits > 3, logits, torch.full_like(logits, -4.0))
    chance = torch.rand(shape, generator=random, device=machine.device)
    return logits, chance < torch.sigmoid(logits), chance > 0.1 * torch.rand(1, generator=random, device=machine.device)


def measure_auc(report: Report, machine: Machine) -> None:
    """Add auc/*: equal counts first, then times at 1 and 64 million scores, and on scores of one bin."""
    right = True
    for name, skewed in (("random", False), ("skewed", True)):
        batch = scores(machine, 4 * 1000, skewed=skewed)
        ours, wanted = (BucketedAUC(ACTIONS, machine.device, impl=impl) for impl in ("triton", "reference"))  # type: ignore[arg-type]
        ours.update(*batch)
        wanted.update(*batch)
        wrong = sum(
            int((ours.state()[key] != wanted.state()[key]).sum())
            for key in ("positives_AB", "negatives_AB", "clipped_A")
        )
        apart = error(ours.sums_A4, wanted.sums_A4)
        report.figures[f"auc/{name}/wrong_counts"] = Figure(value=float(wrong), unit="bins", at_most=0.0)
        report.figures[f"auc/{name}/sums_error"] = Figure(value=apart, unit="of the largest", at_most=1e-6)
        right &= wrong == 0 and apart <= 1e-6
    if not right:
        return
    sizes = {"1M": SMALL, "64M": LARGE} if not machine.quick else {"1M": 4 * 512, "64M": 4 * 1024}
    empty = torch.zeros(1, device=machine.device)
    launch = machine.seconds(lambda: empty.add_(1.0))
    for name, count in sizes.items():
        _time(report, machine, name, scores(machine, count), launch)
    _time(report, machine, "64M_skewed", scores(machine, sizes["64M"], skewed=True), launch)


def _time(report: Report, machine: Machine, name: str, batch: tuple[Tensor, Tensor, Tensor], launch: float) -> None:
    ours, plain = (BucketedAUC(ACTIONS, machine.device, impl=impl) for impl in ("triton", "reference"))  # type: ignore[arg-type]
    seconds = machine.seconds(lambda: ours.update(*batch))
    torch_seconds = machine.seconds(lambda: plain.update(*batch))
    has_goals = not machine.quick
    report.figures[f"auc/{name}/microseconds"] = Figure(value=1e6 * seconds, unit="us", baseline=1e6 * torch_seconds)
    report.figures[f"auc/{name}/over_torch"] = Figure(value=torch_seconds / seconds, unit="x")
    if name == "1M":
        report.figures["auc/1M/launches"] = Figure(
            value=seconds / launch, unit="empty launches", at_most=MAX_LAUNCHES if has_goals else None
        )
        host = machine.seconds(lambda: _through_host(batch))
        report.figures["auc/1M/over_host"] = Figure(
            value=host / seconds, unit="x", at_least=MIN_OVER_HOST if has_goals else None
        )
        return
    report.figures[f"auc/{name}/bandwidth_fraction"] = Figure(
        value=machine.fraction(batch[0].numel() * _BYTES, seconds),
        unit="of a copy's bytes/s",
        at_least=MIN_BANDWIDTH if has_goals else None,
    )


def _through_host(batch: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """Copy to the host and sort there, action by action: the exact AUC that most loops compute."""
    logits, labels, known = (x.cpu() for x in batch)
    found = []
    for action in range(logits.shape[1]):
        order = torch.argsort(logits[known[:, action], action])
        positive = labels[known[:, action], action][order]
        ranks = torch.arange(1, len(positive) + 1, dtype=torch.float64)
        count = int(positive.sum())
        pairs = max(count * (len(positive) - count), 1)
        found.append((float(ranks[positive].sum()) - count * (count + 1) / 2) / pairs)
    return found
