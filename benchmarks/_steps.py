"""Parts of a step that must not be felt: in-training metrics, and the dense optimizer against the framework's default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks._child import measure
from benchmarks._ours import Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._report import Figure, Report
from benchmarks._speed import HEADS
from gr_core.model.recommender import new_recommender
from gr_core.train.optim import DenseOptimizer
from gr_core.train.running_metrics import THRESHOLDS, ThresholdedAUC
from kernels.bucketed_auc import BucketedAUC

MAX_METRICS_FRACTION = 0.01
MIN_FUSED_SPEEDUP = 2.0


def measure_steps(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add the share of a step that metrics take, and the fused optimizer's gain, at both widths."""
    for preset in sizes["presets"][:2]:
        found = measure(
            "benchmarks._steps:metrics_share",
            work=str(work),
            preset=preset,
            width=sizes["width"] or 64,
            num_tokens=sizes["tokens"],
            steps=sizes["steps"],
            rounds=sizes["rounds"],
        ).result
        report.figures[f"metrics/{preset}/step_fraction"] = Figure(
            value=found["fraction"], unit="of a step", at_most=MAX_METRICS_FRACTION, baseline=found["naive_fraction"]
        )
        report.conditions[f"metrics/{preset}"] = found
    for width in (64, 256):
        found = measure(
            "benchmarks._steps:optimizers", width=width, steps=sizes["steps"], rounds=sizes["rounds"]
        ).result
        report.figures[f"optimizer/{width}/fused_speedup"] = Figure(
            value=found["speedup"], unit="x", at_least=MIN_FUSED_SPEEDUP
        )
        report.conditions[f"optimizer/{width}"] = found
    report.conditions["metrics"] = {
        "baseline": f"{THRESHOLDS} thresholds compared with every probability, two-layer model"
    }


def metrics_share(work: str, preset: str, width: int, num_tokens: int, steps: int, rounds: int) -> dict[str, Any]:
    """Train, and read the share of metrics off the night's own attribution; time both kinds of metrics on like logits.

    Returns:
        fraction and naive_fraction of a step, milliseconds of a step and of each kind, load.
    """
    pack = pack_of(Path(work) / f"steps-{preset}", preset, num_tokens)
    ours = Ours(night_of(pack, {"width": width, "num_layers": 2, "num_heads": HEADS}))
    index = ours.night.reader.index
    num_rows = round(index["num_supervised"] / len(index["batch_tokens"]))
    logits, labels, known = torch.randn(num_rows, 3), torch.rand(num_rows, 3) < 0.2, torch.ones(num_rows, 3).bool()
    fused, naive = BucketedAUC(3), ThresholdedAUC(3)

    def repeat(metrics: BucketedAUC | ThresholdedAUC) -> float:
        for _ in range(steps):
            metrics.update(logits, labels, known)
        return steps

    rates = interleave(
        {
            "step": lambda: ours.train(steps) * 0.0 + steps,
            "fused": lambda: repeat(fused),
            "naive": lambda: repeat(naive),
        },
        rounds,
    )
    rest = medians(rates)
    inside = ours.clock.metrics()
    parts = {key: value for key, value in inside.items() if key.startswith("perf/seconds/")}
    return {
        "fraction": inside["perf/seconds/metrics"] / sum(parts.values()),
        "naive_fraction": ratio(rates, "step", "naive") / (1 + ratio(rates, "step", "naive")),
        "milliseconds": {name: 1000 / rate for name, rate in rest.items()},
        "targets_per_step": num_rows,
        "load": round(os.getloadavg()[0], 2),
    }


def optimizers(width: int, steps: int, rounds: int) -> dict[str, Any]:
    """Move a four-layer model's dense parameters with the product's optimizer and with torch's default AdamW.

    Returns:
        speedup, milliseconds a step of each (both clip by the total norm), parameters, load.
    """
    from gr_core.model.settings import ModelConfig
    from gr_core.train.settings import TrainConfig

    config = ModelConfig(width=width, num_layers=4, num_heads=HEADS)
    models = [new_recommender(config, 3, 3, 0) for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    ours = DenseOptimizer(models[0], TrainConfig())
    plain = torch.optim.AdamW(models[1].parameters(), lr=1e-3)

    def fused() -> float:
        for _ in range(steps):
            ours.step(1.0, ours.norm())
        return steps

    def default() -> float:
        for _ in range(steps):
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
            plain.step()
        return steps

    rates = interleave({"fused": fused, "default": default}, rounds)
    return {
        "speedup": ratio(rates, "fused", "default"),
        "milliseconds": {name: 1000 / rate for name, rate in medians(rates).items()},
        "parameters": sum(parameter.numel() for parameter in models[0].parameters()),
        "load": round(os.getloadavg()[0], 2),
    }
