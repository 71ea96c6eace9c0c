"""Peak memory of training by precision and activation checkpointing, and how well the model of it foretells it.

Each setting trains two batches of the product's night in a process of its own, whose peak is the kernel's. What a
process takes without a batch is measured likewise and subtracted where activations are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import _ours, _segments
from benchmarks._child import measure
from benchmarks._figures import Figure, Report

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32/none": {},
    "fp32/block": {"activation_checkpointing": "block"},
    "bf16/none": {"precision": "bf16"},
    "bf16/block": {"precision": "bf16", "activation_checkpointing": "block"},
}
MODEL = {"width": 256, "num_layers": 6, "num_heads": 4}
TOKEN_BUDGET = 16_384
LEAST_SAVED = 0.3
"""Of the activations' memory, by checkpointing: the issue asks that it is measured; less would not pay for a third pass."""


def measure_memory(
    report: Report, work: Path, *, model: Mapping[str, Any] | None = None, token_budget: int = TOKEN_BUDGET
) -> None:
    """Add the peak of each setting, what checkpointing saves, and the peak over what `pack.token_budget = "auto"` counts on.

    Args:
        report: Gets the figures.
        work: Folder for the pack.
        model: Model settings; None: `MODEL`.
        token_budget: Tokens a batch.
    """
    shape = dict(model or MODEL)
    pack = _ours.pack_of(work / "memory", "feed", 3 * token_budget, token_budget=token_budget)
    arguments: dict[str, Any] = {"pack": str(pack), "model": shape}
    idle = measure("benchmarks._memory:train", **arguments, train={}, batches=0)
    peaks = {
        name: measure("benchmarks._memory:train", **arguments, train=train, batches=2)
        for name, train in SETTINGS.items()
    }
    for name, run in peaks.items():
        report.figures[f"memory/{name}/peak_bytes"] = Figure(value=run.peak_bytes, unit="bytes")
        report.figures[f"memory/{name}/peak_over_modelled"] = Figure(
            value=run.peak_bytes / run.result["modelled_bytes"], unit="of the bytes that auto counts on", at_most=1.0
        )
    above = {name: run.peak_bytes - idle.peak_bytes for name, run in peaks.items()}
    for precision in ("fp32", "bf16"):
        kept, again = above[f"{precision}/none"], above[f"{precision}/block"]
        report.figures[f"memory/{precision}/saved_by_checkpointing"] = Figure(
            value=1 - again / kept if kept > 0 else None, unit="of the bytes above an idle night", at_least=LEAST_SAVED
        )
    report.conditions["memory"] = {"model": shape, "token_budget": token_budget, "idle_bytes": idle.peak_bytes}


def train(pack: str, model: dict[str, Any], train: dict[str, Any], batches: int) -> dict[str, float]:
    """Train the first batches of a pack; returns what the model of memory counts on for them."""
    from gr_core.train.memory import Workload, step_memory

    night = _ours.night_of(Path(pack), model, train)
    for number in range(batches):
        night.step([number], 1.0, night.clock(_ours.NIGHT_STEPS))
    index, run = night.reader.index, night.run
    starts = torch.tensor(index["segment_starts"])
    longest = int(starts.diff().max())
    modelled = step_memory(
        Workload(
            model=run.model,
            train=run.train,
            num_actions=len(_segments.ACTIONS),
            num_supervised=len(_segments.ACTIONS),
            rows={spec.name: spec.rows for spec in run.tables},
            max_history=longest // 2,
            max_targets=longest - longest // 2,
        )
    )
    return {"modelled_bytes": float(modelled.total(int(index["token_budget"])))}
