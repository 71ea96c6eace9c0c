"""Packing: tokens a second and core from ragged arrays to the page cache, unused budget, what padding wastes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import _segments
from benchmarks._child import measure
from benchmarks._padding import padding_table
from benchmarks._report import Figure, Report
from gr_core.data.packfile import PackMeta, write_pack

PRESETS = ("ads", "feed")
TOKEN_BUDGET = 8192
MIN_TOKENS_PER_SECOND = 10e6
MAX_UNUSED_FRACTION = 0.01


def measure_packing(report: Report, work: Path, num_tokens: int) -> None:
    """Add unused budget and speed of packing for both presets, and the table of what padding wastes."""
    for preset in PRESETS:
        rows = padding_table(preset, num_segments=num_tokens // 200)
        report.conditions[f"padding/{preset}"] = rows
        report.figures |= {
            f"padding/{preset}/{row['layout']}/{row['grouping']}": Figure(
                value=row["wasted_fraction"], unit="of the tokens computed" if not place else "of the budget"
            )
            for place, row in enumerate(rows)
        }
        run = measure(
            "benchmarks._packing:pack",
            preset=preset,
            num_tokens=num_tokens,
            token_budget=TOKEN_BUDGET,
            out=str(work / "pack"),
        )
        found = run.result
        report.figures |= {
            f"packing/{preset}/unused_budget_fraction": Figure(
                value=found["unused_budget_fraction"], unit="of the budget", at_most=MAX_UNUSED_FRACTION
            ),
            f"packing/{preset}/tokens_per_second_and_core": Figure(
                value=found["num_tokens"] / max(found["seconds"], found["cpu_seconds"]),
                unit="tokens/s/core",
                at_least=MIN_TOKENS_PER_SECOND,
            ),
        }
        report.conditions[f"packing/{preset}"] = {**found, "peak_bytes": run.peak_bytes}
        shutil.rmtree(work / "pack")


def pack(preset: str, num_tokens: int, token_budget: int, out: str) -> dict[str, Any]:
    """Write one pack of ragged arrays, timed from the arrays to the finished index, and sync it to disk afterwards.

    Returns:
        seconds, cpu_seconds, and what the index says of the pack.
    """
    source = _segments.source_of(preset, num_tokens)
    meta = PackMeta(
        role="train",
        features=_segments.FEATURES,
        actions=_segments.ACTIONS,
        supervised=(1 << len(_segments.ACTIONS)) - 1,
        token_budget=token_budget,
    )
    began, cpu = time.perf_counter(), time.process_time()
    index = write_pack(Path(out), source, meta)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    os.sync()
    batches = len(index["batch_tokens"])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_tokens": index["num_tokens"],
        "num_segments": index["num_segments"],
        "token_budget": token_budget,
        "batches": batches,
        "unused_budget_fraction": 1 - index["num_tokens"] / (batches * token_budget),
    }
