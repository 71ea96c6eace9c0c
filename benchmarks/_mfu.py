"""Model FLOP utilisation on the CPU: what a step's arithmetic is of the machine's own matrix rate in the same minutes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._child import measure
from benchmarks._matrices import Matrices
from benchmarks._ours import Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._report import Figure, Report
from benchmarks._speed import HEADS
from gr_core.train.flops import ModelFlops
from gr_core.train.loop import Night

MIN_MFU = 0.5


def measure_mfu(report: Report, work: Path, sizes: Mapping[str, Any]) -> None:
    """Add MFU of both presets at width 256 and four layers."""
    for preset in sizes["presets"]:
        found = measure(
            "benchmarks._mfu:utilisation",
            work=str(work),
            preset=preset,
            width=sizes["width"] or 256,
            layers=4,
            num_tokens=sizes["tokens"],
            batches=sizes["batches"]["ours"],
            rounds=sizes["rounds"],
            matrix=sizes["matrix"],
        ).result
        report.figures[f"mfu/{preset}"] = Figure(value=found["mfu"], unit="of the matrix rate", at_least=MIN_MFU)
        report.conditions[f"mfu/{preset}"] = found


def flop_per_token(night: Night) -> float:
    """Return the FLOP of training on a pack over its tokens (design section 5); batches differ by little."""
    flops = ModelFlops.of(night.model, width=night.run.model.width, num_layers=night.run.model.num_layers)
    found = [
        flops.of_batch(batch.lo.numpy(), batch.hi.numpy(), np.flatnonzero(batch.supervise.numpy())).total
        for batch in night.reader
    ]
    return float(sum(found)) / int(night.reader.index["num_tokens"])


def utilisation(
    work: str, preset: str, width: int, layers: int, num_tokens: int, batches: int, rounds: int, matrix: int
) -> dict[str, Any]:
    """Train our night and multiply matrices in turn.

    Returns:
        MFU (median over rounds), both rates in FLOP a second, seconds by part of a step, load.
    """
    pack = pack_of(Path(work) / f"mfu-{preset}", preset, num_tokens)
    ours = Ours(night_of(pack, {"width": width, "num_layers": layers, "num_heads": HEADS}))
    night = ours.night
    each = flop_per_token(night)

    rates = interleave({"ours": lambda: each * ours.train(batches), "matrix": Matrices(matrix).multiply}, rounds)
    clock = ours.clock.metrics()
    parts = {key.rpartition("/")[2]: value for key, value in clock.items() if key.startswith("perf/seconds/")}
    return {
        "mfu": ratio(rates, "ours", "matrix"),
        "flop_per_second": medians(rates),
        "flop_per_token": each,
        "seconds": parts,
        "width": width,
        "layers": layers,
        "matrix": matrix,
        "load": round(os.getloadavg()[0], 2),
    }
