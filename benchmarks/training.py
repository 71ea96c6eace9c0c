"""`python -m benchmarks.training`: the training core's speed, memory and quality, in ratios measured side by side in one run.

The product's own step on generated packs of two products' lengths against padded loops; model FLOP utilisation; what
metrics, optimizers and tables cost; quality by layout, and of nights against retrains. What is compared is interleaved in
time. `--device cuda` runs the large model on a GPU instead, where torch, numpy, pyarrow and safetensors are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._figures import Report

PARTS = (
    "speed64",
    "speed256",
    "others",
    "mfu",
    "steps",
    "overhead",
    "tables",
    "rollout",
    "parallel",
    "links",
    "memory",
    "compiled",
    "layouts_world",
    "layouts_kuairand",
    "incremental_world",
    "incremental_kuairand",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal (never with --quick), else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes, no goals: does it run")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some of the parts")
    parser.add_argument("--work", type=Path, help="folder for packs and homes (default: the system's temporary folder)")
    parser.add_argument(
        "--rivals",
        default="",
        help="folder with fbgemm-gpu-cpu, recbole, replay-rec (pip install --no-deps --target FOLDER ...), to measure against",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="instead of the parts: steps of the large model on one such device"
    )
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    # As in the product's training process; read by OpenMP when a child loads torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    report = Report(conditions=conditions(quick=options.quick))
    if options.device:
        return _on_device(report, options.device, quick=options.quick)
    from benchmarks import _parts
    from benchmarks._report import conclude, console, work_folder
    from gr_core.environment import KEPT_MEMORY

    for key, value in KEPT_MEMORY.items():  # as in the product's training process, for all that is compared
        os.environ.setdefault(key, value)

    sizes = {**(_parts.QUICK if options.quick else _parts.FULL), "rivals": options.rivals}
    with work_folder("training", options.work) as work:
        for name in options.only or PARTS:
            console.print(f"measuring {name}")
            _parts.PARTS[name](report, work, sizes)

    return conclude(report, enforce=not options.quick, as_json=options.json)


def _on_device(report: Report, device: str, *, quick: bool) -> int:
    """Measure a device and print the one object: a bare machine has no library for tables."""
    from benchmarks._device import measure_device

    measure_device(report, device, quick=quick)
    print(json.dumps(report.to_json(enforce=not quick)))
    return 1 if report.missed() and not quick else 0


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
