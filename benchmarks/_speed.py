"""Real tokens a second against padded loops, on the lengths of two products and of long histories, in pairs.

One child process a pair of preset and width: our night, the padded loop with random users, the same with users of like
lengths, and the same on users of one length, interleaved in time; equal width, layers, heads, threads, no dropout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks._child import measure
from benchmarks._ours import ROWS, Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._report import Figure, Report
from benchmarks._rival import PaddedModel, Rival, read_users
from gr_core.train.attribution import PARTS

HEADS = 4
GOALS = {
    "padded": {"ads": 6.0, "feed": 3.0, "long": None},
    "bucketed": {"ads": 1.0, "feed": 1.0, "long": 1.5},
    "equal": {"ads": 0.9, "feed": 0.9, "long": 0.9},
}
"""Least rate of ours over the rival's, by rival and preset."""


def measure_speed(report: Report, work: Path, sizes: Mapping[str, Any], width: int) -> None:
    """Add the ratios to the three padded loops at a width, all presets."""
    for preset in sizes["presets"]:
        found = measure(
            "benchmarks._speed:pair",
            work=str(work),
            preset=preset,
            width=sizes["width"] or width,
            layers=sizes["layers"],
            num_tokens=sizes["tokens"],
            batches=sizes["batches"],
            rounds=sizes["rounds"],
        ).result
        name = f"speed/{preset}/{width}"
        report.figures[f"{name}/tokens_per_second"] = Figure(value=found["rates"]["ours"], unit="real tokens/s")
        for rival, goals in GOALS.items():
            report.figures[f"{name}/ours_over_{rival}"] = Figure(
                value=found["ratios"][rival],
                unit="x",
                at_least=goals[preset],
                baseline=found["rates"][rival],
            )
        report.conditions[name] = found
    report.conditions["speed"] = {
        "baseline": "real tokens/s of the rival; ratios are the median of those of the rounds",
        "dropout": 0.0,
        "heads": HEADS,
        "rows": ROWS,
        "rivals": "padded: 64 random users, key padding and causal mask; bucketed: 64 of like lengths; equal: 64 of one",
    }


def pair(
    work: str, preset: str, width: int, layers: int, num_tokens: int, batches: Mapping[str, int], rounds: int
) -> dict[str, Any]:
    """Train our night and the three padded loops on one pack's tokens, interleaved.

    Returns:
        Median real tokens a second by arm, ratios of ours to the others, load before and after.
    """
    load = os.getloadavg()[0]
    pack = pack_of(Path(work) / f"speed-{preset}-{width}", preset, num_tokens)
    ours = Ours(night_of(pack, {"width": width, "num_layers": layers, "num_heads": HEADS}))
    users = read_users(ours.night.reader)
    rows = [ROWS[name] + 3 for name in ours.night.reader.features]

    def model() -> PaddedModel:
        torch.manual_seed(0)
        return PaddedModel(width, layers, HEADS, rows, len(ours.night.actions), 0.0)

    mean = round(float(users.lengths.mean()))
    arms = {
        "ours": lambda: ours.train(batches["ours"]),
        "padded": Rival(users, model(), "random").some(batches["padded"]),
        "bucketed": Rival(users, model(), "bucketed").spread(batches["bucketed"]),
        "equal": Rival(users.cut(mean), model(), "equal").some(batches["equal"]),
    }
    rates = interleave(arms, rounds)
    clock = ours.clock.metrics()
    return {
        "rates": medians(rates),
        "ratios": {name: ratio(rates, "ours", name) for name in arms if name != "ours"},
        "mean_length": mean,
        "batches": dict(batches),
        "padding_fraction": clock["perf/padding_fraction"],
        "seconds": {part: clock[f"perf/seconds/{part}"] for part in PARTS},
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
