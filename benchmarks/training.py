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
from pathlib import Path
from typing import Any

import torch

from benchmarks import _mfu, _speed, _steps, _tables
from benchmarks._report import Report, conclude, console, work_folder

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
}
PARTS: dict[str, Callable[[Report, Path, Sizes], None]] = {
    "speed64": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 64),
    "speed256": lambda report, work, sizes: _speed.measure_speed(report, work, sizes, 256),
    "mfu": _mfu.measure_mfu,
    "steps": _steps.measure_steps,
    "tables": _tables.measure_tables,
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
