"""torch.compile: a start with an empty cache, one that finds it filled, graphs, and tokens a second with and without.

Each start is a process of its own, as nights are; the cache lies in the benchmark's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import _ours
from benchmarks._child import measure
from benchmarks._figures import Figure, Report

MODEL = {"width": 256, "num_layers": 4, "num_heads": 4}
MOST_GRAPHS = 3
ROUNDS = 5


def measure_compiled(
    report: Report,
    work: Path,
    *,
    model: Mapping[str, Any] | None = None,
    token_budget: int = 4096,
    rounds: int = ROUNDS,
) -> None:
    """Add seconds of a cold and a warm start, graphs after batches of other sizes, and the rate against plain blocks.

    Args:
        report: Gets the figures.
        work: Folder for the pack and the cache.
        model: Model settings; None: `MODEL`.
        token_budget: Tokens a batch.
        rounds: Batches that are timed, of either kind in turn.
    """
    pack = _ours.pack_of(work / "compiled", "feed", 4 * token_budget, token_budget=token_budget)
    arguments: dict[str, Any] = {"pack": str(pack), "model": dict(model or MODEL), "rounds": rounds}
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled-cache")}):
        cold, warm = (measure("benchmarks._compiled:train", **arguments).result for _ in range(2))
    report.figures |= {
        "compiled/cold_seconds": Figure(value=cold["perf/compile/seconds"], unit="s"),
        "compiled/warm_seconds": Figure(
            value=warm["perf/compile/seconds"], unit="s", baseline=cold["perf/compile/seconds"]
        ),
        "compiled/warm_cache_misses": Figure(value=warm["perf/compile/cache_miss"], unit="kernels", at_most=0),
        "compiled/graphs": Figure(value=warm["perf/compile/graphs"], unit="graphs", at_most=MOST_GRAPHS),
        "compiled/rate_over_plain": Figure(value=warm["plain"] / warm["blocks"], unit="x"),
    }
    report.conditions["compiled"] = {"model": arguments["model"], "token_budget": token_budget, "rounds": rounds}


def train(pack: str, model: dict[str, Any], rounds: int) -> dict[str, float]:
    """Train batches of a pack with compiled and with plain blocks in turn; returns median seconds, and perf/compile/*."""
    nights = {
        name: _ours.night_of(Path(pack), model, {"compile": setting})
        for name, setting in (("blocks", "blocks"), ("plain", "off"))
    }
    seconds: dict[str, list[float]] = {name: [] for name in nights}
    for number in range(rounds + 1):
        for name, night in nights.items():
            began = time.perf_counter()
            night.step([number % len(night.reader)], 1.0, night.clock(_ours.NIGHT_STEPS))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: sorted(each[1:])[rounds // 2] for name, each in seconds.items()}
    return {**medians, **nights["blocks"].compilation.metrics()}
