"""`interval_attention` beside FlexAttention, and FlashAttention on runs of varying length where that applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._figures import Figure, Report
from benchmarks._kernel_timing import Machine, error, generator
from gr_core.model.attention import Layout
from kernels.interval_attention import Silu, interval_attention, interval_attention_reference

HEADS, HEAD_DIM = 8, 64
TOKENS, LONGEST, TARGETS = 65_536, 1_024, 16
WINDOW = 256
"""History tokens that a window leaves visible."""
MIN_OVER_FLEX, MIN_OVER_VARLEN = 1.0, 0.8
_TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 3e-2}  # fp32 products may be tf32 on the device


@dataclass(frozen=True, slots=True)
class Work:
    """One batch's layout and tensors."""

    layout: Layout
    qkv: tuple[Tensor, Tensor, Tensor]
    lo: Tensor
    hi: Tensor
    itself: Tensor

    def ours(self, weighting: Silu | None = None) -> Tensor:
        """Attend by the Triton kernel."""
        return interval_attention(*self.qkv, self.lo, self.hi, self.itself, weighting=weighting, impl="triton")

    @property
    def pairs(self) -> int:
        """Queries times the keys each sees."""
        return int((self.hi - self.lo).sum()) + len(self.lo)


def lay_out(lengths: list[int], *, window: int | None, targets: int) -> Layout:
    """Return segments of history that sees itself, `window` back or all, then targets that see the history."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    lo, hi, target = [], [], []
    for begin, length in zip(starts, lengths, strict=False):
        few = min(targets, length)
        seen = np.minimum(np.arange(length), length - few)
        first = np.zeros(length, np.int64) if window is None else np.maximum(seen - window, 0)
        lo.append(begin + first)
        hi.append(begin + seen)
        target.append(begin + np.arange(length - few, length))
    order = np.arange(starts[-1])
    return Layout(
        segment_starts=starts,
        lo=np.concatenate(lo),
        hi=np.concatenate(hi),
        targets=np.concatenate(target),
        time=order * 1_000_000,
        position=order,
    )


def work_of(machine: Machine, layout: Layout, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Work:
    """Return random queries, keys and values of a layout on the device."""
    random, count = generator(machine), len(layout.lo)
    made = [torch.randn(count, HEADS, head_dim, generator=random, device=machine.device).to(dtype) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in made)
    lo, hi = (torch.from_numpy(x).to(machine.device) for x in (layout.lo, layout.hi))
    return Work(layout, (q, k, v), lo, hi, torch.arange(count, device=machine.device))


def measure_attention(report: Report, machine: Machine) -> None:
    """Add attention/*: values and gradients against fp64, then times of forward and of both ways."""
    if sum(_is_right(report, machine, dtype) for dtype in _TOLERANCE) < len(_TOLERANCE):
        return
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < (96 if machine.quick else TOKENS):
        lengths.append(min(48, LONGEST) if machine.quick else int(rng.integers(LONGEST // 8, LONGEST + 1)))
    dtype = torch.float32 if machine.quick else torch.bfloat16
    windowed = work_of(machine, lay_out(lengths, window=WINDOW, targets=TARGETS), dtype)
    plain = work_of(machine, lay_out(lengths, window=None, targets=0), dtype)
    rivals: dict[str, tuple[Work, Callable[[Work], Callable[[], Tensor]], float]] = {
        "window_over_flex": (windowed, _flex, MIN_OVER_FLEX),
        "causal_over_varlen": (plain, _varlen, MIN_OVER_VARLEN),
        "causal_over_flex": (plain, _flex, MIN_OVER_FLEX),
    }
    for name, (work, of, goal) in rivals.items():
        _compare(report, machine, name, work, of, goal)
    pointwise = _silu(machine, windowed)
    report.figures["attention/silu/microseconds"] = Figure(
        value=1e6 * machine.seconds(lambda: windowed.ours(pointwise).sum().backward()), unit="us, both ways"
    )
    report.conditions["attention"] = {
        "tokens": len(windowed.lo),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "window": WINDOW,
        "pairs": {"window": windowed.pairs, "causal": plain.pairs},
        "dtype": str(dtype),
    }


def _is_right(report: Report, machine: Machine, dtype: torch.dtype) -> bool:
    layout = lay_out([1, 63, 65] if machine.quick else [1, 127, 128, 129, 1025], window=40, targets=3)
    work = work_of(machine, layout, dtype, head_dim=16)
    exact = [x.detach().double().requires_grad_() for x in work.qkv]
    wanted = interval_attention_reference(*exact, work.lo, work.hi, work.itself)
    cotangent = torch.randn(wanted.shape, generator=generator(machine), device=machine.device, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, exact, cotangent)
    found = work.ours()
    mine = torch.autograd.grad(found, work.qkv, cotangent.to(dtype))
    kind, most = str(dtype).removeprefix("torch."), _TOLERANCE[dtype]
    right = True
    for name, ours, theirs in zip("oqkv", (found, *mine), (wanted, *gradients), strict=True):
        apart = error(ours, theirs)
        label = "output" if name == "o" else f"d{name}"
        report.figures[f"attention/{kind}/{label}_error"] = Figure(value=apart, unit="of the largest", at_most=most)
        right &= apart <= most
    return right


def _compare(
    report: Report,
    machine: Machine,
    name: str,
    work: Work,
    of: Callable[[Work], Callable[[], Tensor]],
    goal: float,
) -> None:
    if machine.device.type != "cuda":
        report.conditions[f"attention/{name}"] = "not measured: FlexAttention and FlashAttention train on CUDA alone"
        return
    try:
        rival = of(work)
        rival().sum().backward()
    except Exception as failure:  # noqa: BLE001 -- another release may lack it: told, and ours is measured all the same
        report.conditions[f"attention/{name}"] = f"rival does not run: {type(failure).__name__}: {failure}"[:300]
        return
    for way, run in (("forward", _forward), ("both", _both_ways)):
        ours, theirs = machine.seconds(partial(run, work.ours)), machine.seconds(partial(run, rival))
        report.figures[f"attention/{name}/{way}"] = Figure(
            value=theirs / ours, unit="x", at_least=None if machine.quick else goal, baseline=1e6 * theirs
        )
        flops = 4 * work.pairs * HEADS * HEAD_DIM * (1 if way == "forward" else 3.5)
        report.figures[f"attention/{name}/{way}_tflops"] = Figure(
            value=flops / ours / 1e12, unit="TFLOP/s of pairs seen"
        )


def _forward(attend: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        attend()


def _both_ways(attend: Callable[[], Tensor]) -> None:
    attend().sum().backward()  # type: ignore[no-untyped-call]


def _flex(work: Work) -> Callable[[], Tensor]:
    from gr_core.model.attention.flex import plan_flex

    return _planned(work, plan_flex(work.layout, token_budget=len(work.lo)))


def _varlen(work: Work) -> Callable[[], Tensor]:
    from gr_core.model.attention.varlen import plan_varlen

    return _planned(work, plan_varlen(work.layout, token_budget=len(work.lo)))


def _planned(work: Work, plan: Any) -> Callable[[], Tensor]:
    on_device = plan.map(lambda tensor: tensor.to(work.lo.device))
    q, k, v = work.qkv
    return lambda: on_device.attend(torch.cat([q, k], dim=1), v)


def _silu(machine: Machine, work: Work) -> Silu:
    random = generator(machine)
    position, time = (torch.randn(64, HEADS, generator=random, device=machine.device) for _ in range(2))
    places = torch.from_numpy(work.layout.position).to(machine.device, torch.int32)
    moments = torch.from_numpy(work.layout.time).to(machine.device)
    return Silu(
        position_bias=position,
        time_bias=time,
        divisor=float(LONGEST),
        query_position=places,
        key_position=places,
        query_time=moments,
        key_time=moments,
    )
