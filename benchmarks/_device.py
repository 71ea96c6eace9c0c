"""`python -m benchmarks.training --device cuda`: steps of the large model on one device, on a pack made on the spot.

Needs torch, numpy, pyarrow and safetensors alone. The model is that of conf/h100.toml where the file is there, its tables
cut to `ROWS`, on one rank; utilisation is against the data sheet's peak of the device (gr_core.train.hardware).
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks._figures import Figure, Report
from benchmarks._ours import ROWS as SMALL_ROWS
from benchmarks._ours import Ours, night_of, pack_of
from gr_core.train.attribution import PARTS

CONFIG = Path(__file__).parent.parent / "conf" / "h100.toml"
MODEL = {"width": 1024, "num_layers": 8, "num_heads": 8}
"""Where the file is not there."""
ROWS = {**SMALL_ROWS, "item_id": 200_000, "creator": 20_000}
MIN_MFU = 0.45
"""The best open figure is 0.345."""
STEPS, WARM_UP = 200, 20
_NOT_HERE = ("item_features", "context_features")


def measure_device(report: Report, device: str, *, quick: bool) -> None:
    """Add tokens a second, MFU, memory and the split of a step.

    Args:
        report: Gets device/*.
        device: cuda, or cpu to see whether it runs.
        quick: A small model and few steps.
    """
    model, train, budget = settings_of_file(CONFIG)
    if quick:
        model, budget = {**model, "width": 32, "num_heads": 4, "num_layers": 2}, 2048
    steps, warm_up = (4, 1) if quick else (STEPS, WARM_UP)
    with tempfile.TemporaryDirectory(prefix="training-") as work:
        pack = pack_of(Path(work) / "pack", "ads", (steps + warm_up) * budget, token_budget=budget, rows=ROWS)
        night = night_of(pack, model, train, rows=ROWS, device=device)
        warm = Ours(night)
        warm.train(warm_up)
        if night.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ours = Ours(night, first=warm_up)
        tokens = ours.train(steps)
        clock = ours.clock.metrics()
    report.figures |= {
        "device/tokens_per_second": Figure(value=tokens / clock["perf/train_seconds"], unit="real tokens/s"),
        "device/mfu": Figure(value=clock.get("perf/mfu"), unit="of the peak", at_least=MIN_MFU, baseline=0.345),
        "device/peak_memory_bytes": Figure(value=clock["perf/peak_memory_bytes"], unit="bytes"),
        **{f"device/seconds/{part}": Figure(value=clock[f"perf/seconds/{part}"], unit="s") for part in PARTS},
    }
    report.conditions["device"] = {
        "device": torch.cuda.get_device_name() if night.device.type == "cuda" else str(night.device),
        "model": model,
        "train": train,
        "token_budget": budget,
        "steps": steps,
        "rows": ROWS,
        "dense_parameters": sum(parameter.numel() for parameter in night.model.parameters()),
        "perf": clock,
    }


def settings_of_file(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the model's and training's settings and the token budget of a config file, for one rank.

    Features stand in the benchmark's pack, ranks and what belongs to a night's flow do not.
    """
    if not path.exists():
        return dict(MODEL), {"precision": "bf16"}, 32_768
    values: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    model = {key: value for key, value in values.get("model", {}).items() if key not in _NOT_HERE}
    left_out = (
        "distributed",
        "action_weights",
        "position_feature",
        "position_weights",
        "save_every_steps",
        "memory_gib",
    )
    train = {key: value for key, value in values.get("train", {}).items() if key not in left_out}
    budget = values.get("pack", {}).get("token_budget", 32_768)
    return model, {**train, "micro_batches": 1}, budget if isinstance(budget, int) else 32_768
