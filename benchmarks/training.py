"""`python -m benchmarks.training`: the training core's speed, memory and quality, in ratios measured side by side in one run.

The product's own step on generated packs of two products' lengths against padded loops; model FLOP utilisation; what
metrics, optimizers and tables cost. What is compared is interleaved in time and every part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import _incremental, _layouts, _mfu, _speed, _steps, _tables
from benchmarks._report import Report, conclude, console, work_folder
from gr_core.config import Config, load_config

CONF = Path(__file__).parent.parent / "conf"
KUAIRAND = Path("../shared/data/kuairand")
KUAIRAND_FIRST = date(2022, 4, 25)
SHIFT_NIGHT = 6
Sizes = dict[str, Any]
FULL: Sizes = {
    "presets": ["ads", "feed", "long"],
    "width": None,
    "layers": 2,
    "tokens": 1_500_000,
    "batches": {"ours": 4, "padded": 2, "bucketed": 8, "equal": 6},
    "rounds": 5,
    "matrix": 1024,
    "steps": 10,
    "table_rows": [100_000, 1_000_000],
    "ids": _tables.NUM_IDS,
    "world": [],
    "layouts": {"seeds": (0, 1, 2), "nights": 5, "judged_from": 3},
    "incremental": {
        "nights": 10,
        "judged": (4, 5, 6, 7, 8, 9),
        "windows": ((2, 1), (4, 1), (_incremental.ALL, 1), (_incremental.ALL, 2)),
    },
    "kuairand": {"nights": 7, "judged": (3, 6), "windows": ((3, 1), (_incremental.ALL, 1), (_incremental.ALL, 2))},
}
QUICK: Sizes = {
    **FULL,
    "presets": ["ads"],
    "width": 16,
    "tokens": 20_000,
    "batches": {"ours": 1, "padded": 1, "bucketed": 2, "equal": 1},
    "rounds": 1,
    "matrix": 64,
    "steps": 1,
    "table_rows": [1_000],
    "ids": 500,
    "world": ["source.world.num_users=100", "lake.num_buckets=2", "model.width=16"],
    "layouts": {"seeds": (0,), "nights": 2, "judged_from": 2},
    "incremental": {"nights": 3, "judged": (2,), "windows": ((_incremental.ALL, 1),)},
    "kuairand": {"nights": 2, "judged": (), "windows": ()},
}
PARTS: dict[str, Callable[[Report, Path, Sizes], None]] = {
    "speed64": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 64),
    "speed256": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 256),
    "mfu": _mfu.measure_mfu,
    "steps": _steps.measure_steps,
    "tables": _tables.measure_tables,
    "layouts_world": lambda report, work, sizes: _world(report, work, sizes, "layouts"),
    "layouts_kuairand": lambda report, work, sizes: _kuairand(report, work, sizes, "layouts"),
    "incremental_world": lambda report, work, sizes: _world(report, work, sizes, "incremental"),
    "incremental_kuairand": lambda report, work, sizes: _kuairand(report, work, sizes, "incremental"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal (never with --quick), else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes, no goals: does it run")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="some of the parts")
    parser.add_argument("--work", type=Path, help="folder for packs and homes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    # As in the product's training process; read by OpenMP when a child loads torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sizes = QUICK if options.quick else FULL
    report = Report(conditions=conditions(quick=options.quick))
    with work_folder("training", options.work) as work:
        for name in options.only or list(PARTS):
            console.print(f"measuring {name}")
            PARTS[name](report, work, sizes)

    return conclude(report, enforce=not options.quick, as_json=options.json)


def _world(report: Report, work: Path, sizes: Sizes, what: str) -> None:
    """Measure quality on the embedded world; for `incremental` its taste shifts on night SHIFT_NIGHT."""
    shift = [f"source.world.taste_shift_day={SHIFT_NIGHT}"] if what == "incremental" else []
    config = load_config(CONF / "world.toml", [*_PLAIN, *sizes["world"], *shift])
    first = config.source.world.start if config.source.world else date.min
    _quality(report, work, "world", config, first, sizes, what)


def _kuairand(report: Report, work: Path, sizes: Sizes, what: str) -> None:
    """Measure quality on KuaiRand where its raw files are; else say in the conditions that they are not."""
    if not (KUAIRAND / "log").is_dir():
        report.conditions[f"{what}/kuairand"] = f"skipped: {KUAIRAND} has no raw files"
        return
    config = load_config(CONF / "kuairand.toml", [*_PLAIN, f"source.root={KUAIRAND.resolve()}"])
    _quality(report, work, "kuairand", config, KUAIRAND_FIRST, sizes, what)


_PLAIN = ("train.save_every_steps=0",)  # nothing beside the training: its seconds are compared


def _quality(report: Report, work: Path, name: str, config: Config, first: date, sizes: Sizes, what: str) -> None:
    if what == "layouts":
        _layouts.measure_layouts(report, work, name, config, first, sizes["layouts"])
    else:
        chosen = sizes["kuairand"] if name == "kuairand" else sizes["incremental"]
        _incremental.measure_incremental(report, work, name, config, first, chosen)


def conditions(*, quick: bool) -> dict[str, Any]:
    """Return what the machine is and which torch runs."""
    return {
        "quick": quick,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
