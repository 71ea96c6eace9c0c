"""`python -m benchmarks.data`: the data plane's speed and memory, in ratios measured side by side in one run.

Generated events, heavy-tailed users, 360 days: the full build and one more night against Polars' own read, sort and
write; sequences against a pandas groupby; packing; the loader from warm and cold page cache; what padding wastes by
layout and grouping; what a night costs when only the past grows. `--large` adds a night on 100 million events. Heavy
parts run in processes of their own, whose peak memory is the kernel's.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import _build, _cost, _loading, _packing
from benchmarks._events import Feed
from benchmarks._report import Report, conclude, console, work_folder

Sizes = dict[str, Any]
FULL: Sizes = {
    "build": Feed(num_events=20_000_000),
    "pandas": Feed(num_events=5_000_000, num_buckets=16),
    "large": Feed(num_events=100_000_000),
    "tokens": 10_000_000,
    "quick": False,
}
QUICK: Sizes = {
    "build": Feed(num_events=200_000, num_days=30),
    "pandas": Feed(num_events=100_000, num_days=10, num_buckets=2),
    "large": Feed(num_events=200_000, num_days=30),
    "tokens": 300_000,
    "quick": True,
}
PARTS: dict[str, Callable[[Report, Path, Sizes], None]] = {
    "build": lambda report, work, sizes: _build.measure_build(report, work, sizes["build"]),
    "pandas": lambda report, work, sizes: _build.measure_pandas(report, work, sizes["pandas"]),
    "packing": lambda report, work, sizes: _packing.measure_packing(report, work, sizes["tokens"]),
    "loader": lambda report, work, sizes: _loading.measure_loader(report, work, sizes["tokens"]),
    "wait": lambda report, work, sizes: _loading.measure_wait(report, work),
    "cost": lambda report, work, sizes: _cost.measure_cost(report, work, quick=sizes["quick"]),
    "large": lambda report, work, sizes: _build.measure_large(report, work, sizes["large"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal (never with --quick), else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes, no goals: does it run")
    parser.add_argument(
        "--large", action="store_true", help="also one night on 100 million events (the build takes long)"
    )
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="some of the parts")
    parser.add_argument("--work", type=Path, help="folder for feeds and homes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    parts = options.only or [name for name in PARTS if name != "large" or options.large]
    report = Report(conditions=conditions(quick=options.quick))
    with work_folder("data", options.work) as work:
        for name in parts:
            console.print(f"measuring {name}")
            PARTS[name](report, work, sizes)

    return conclude(report, enforce=not options.quick, as_json=options.json)


def conditions(*, quick: bool) -> dict[str, Any]:
    """Return what the machine is and which releases run."""
    return {
        "quick": quick,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "packages": {name: version(name) for name in ("polars", "pyarrow", "numpy", "torch", "deltalake", "pandas")},
        "polars_threads": os.environ.get("POLARS_MAX_THREADS"),
    }


if __name__ == "__main__":
    sys.exit(main())
