"""What attribution and attention's masks cost of a step, in CPU time, so that a busy machine changes little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._child import measure
from benchmarks._ours import Ours, night_of, pack_of
from benchmarks._report import Figure, Report
from benchmarks._speed import HEADS
from gr_core.model.attention import Layout
from gr_core.model.attention.plan import AttentionPlan
from gr_core.train import hardware
from gr_core.train.attribution import PARTS, attribution
from gr_core.train.flops import ModelFlops
from gr_core.train.tracing import Counts, counted

MAX_FRACTION = 0.01
MAX_MASK_FRACTION = 0.05  # case F18
_EMPTY_STEPS = 1000


def measure_overhead(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add the share of a step that attribution takes; what it does once a night stands in the conditions."""
    found = measure(
        "benchmarks._overhead:overhead",
        work=str(work),
        width=sizes["width"] or 64,
        num_tokens=sizes["tokens"],
        steps=sizes["steps"],
    ).result
    report.figures["attribution/step_fraction"] = Figure(
        value=found["step_fraction"], unit="of a step's CPU time", at_most=MAX_FRACTION
    )
    report.conditions["attribution"] = found
    for preset in sizes["presets"]:
        masks = measure(
            "benchmarks._overhead:masks",
            work=str(work),
            preset=preset,
            width=sizes["width"] or 64,
            num_tokens=sizes["tokens"],
            steps=sizes["steps"],
        ).result
        report.figures[f"masks/{preset}/step_fraction"] = Figure(
            value=masks["fraction"], unit="of a step's CPU time", at_most=MAX_MASK_FRACTION
        )
        report.conditions[f"masks/{preset}"] = masks


def overhead(work: str, width: int, num_tokens: int, steps: int) -> dict[str, Any]:
    """Time steps, then all that attribution does in one without a step in it.

    Returns:
        step_fraction; CPU milliseconds of a step and of attribution in it; CPU milliseconds that counting one step's
        operators adds and that measuring the peak takes, each once a night; load.
    """
    night = night_of(
        pack_of(Path(work) / "overhead", "ads", num_tokens), {"width": width, "num_layers": 2, "num_heads": HEADS}
    )
    ours = Ours(night)
    ours.train(2)
    step = _cpu_seconds(lambda: ours.train(steps)) / steps
    counts: Counts = {}
    with_counts = _cpu_seconds(lambda: _count(ours, counts))
    flops = ModelFlops.of(night.model, width=width, num_layers=2)
    batch = night.reader.batch(0)
    targets = batch.supervise.numpy().nonzero()[0]
    clock = attribution(
        night.run, night.device, token_budget=8192, steps=_EMPTY_STEPS, count_after_seconds=float("inf")
    )

    def empty() -> None:
        for _ in range(_EMPTY_STEPS):
            with clock.step():
                for part in PARTS:
                    with clock.part(part):
                        pass
                clock.count(batch.num_tokens, 0.0, flops.of_batch(batch.lo.numpy(), batch.hi.numpy(), targets))

    inside = _cpu_seconds(empty) / _EMPTY_STEPS
    peak = _cpu_seconds(lambda: hardware.peak(night.device, hardware.Terms()))
    return {
        "step_fraction": inside / step,
        "milliseconds": {
            "step": 1000 * step,
            "attribution": 1000 * inside,
            "counting_once": 1000 * max(with_counts - step, 0.0),
            "peak_once": 1000 * peak,
        },
        "ops_per_step": counts["perf/ops_per_step"],
        "load": round(os.getloadavg()[0], 2),
    }


def masks(work: str, preset: str, width: int, num_tokens: int, steps: int) -> dict[str, Any]:
    """Train, and time what lays attention out: buckets, pieces and masks, in the thread that reads ahead.

    Returns:
        fraction of a step's CPU time; CPU milliseconds of a step and of its layout; load.
    """
    pack = pack_of(Path(work) / f"masks-{preset}", preset, num_tokens)
    ours = Ours(night_of(pack, {"width": width, "num_layers": 2, "num_heads": HEADS}))
    ours.train(2)
    builder, spent = ours.night.builder, 0.0
    planner = builder.planner

    def timed(layout: Layout) -> AttentionPlan:
        nonlocal spent
        began = time.thread_time()
        plan = planner(layout)
        spent += time.thread_time() - began
        return plan

    builder.planner = timed
    step = _cpu_seconds(lambda: ours.train(steps)) / steps
    return {
        "fraction": spent / steps / step,
        "milliseconds": {"step": 1000 * step, "layout": 1000 * spent / steps},
        "load": round(os.getloadavg()[0], 2),
    }


def _count(ours: Ours, counts: Counts) -> None:
    with counted(ours.night.device, counts):
        ours.train(1)


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
