"""`python -m benchmarks.kernels`: each Triton kernel right first, then its time, beside the same work in torch.

Needs torch and Triton alone besides kernels and gr_core. On a CUDA device sizes are those of a large night and figures
have goals; on the CPU Triton interprets (TRITON_INTERPRET=1), which says whether kernels are right and nothing about speed.
A kernel that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._figures import Report

PARTS = ("auc", "embedding", "attention")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, only correctness has goals: does it run")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some of the parts")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout (also without)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    report = measure_kernels(device, options.only or PARTS, quick=options.quick or device.type == "cpu")
    print(json.dumps(report.to_json()))
    return 1 if report.missed() else 0


def measure_kernels(device: torch.device, parts: Sequence[str], *, quick: bool) -> Report:
    """Return the figures of some parts; see `PARTS`."""
    from benchmarks import _kernel_attention, _kernel_auc, _kernel_embedding
    from benchmarks._kernel_timing import Machine

    measured: dict[str, Callable[[Report, Machine], None]] = {
        "auc": _kernel_auc.measure_auc,
        "embedding": _kernel_embedding.measure_embedding,
        "attention": _kernel_attention.measure_attention,
    }
    machine = Machine.of(device, quick=quick)
    report = Report(conditions=conditions(machine.describe()))
    for name in parts:
        print(f"measuring {name}", file=sys.stderr)
        measured[name](report, machine)
    if device.type == "cpu":  # the interpreter's times say nothing; what has a goal is correctness
        report.figures = {name: figure for name, figure in report.figures.items() if figure.goal is not None}
    return report


def conditions(machine: dict[str, Any]) -> dict[str, Any]:
    """Return what runs where."""
    import triton

    return {
        **machine,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "program": Path(__file__).name,
    }


if __name__ == "__main__":
    sys.exit(main())
