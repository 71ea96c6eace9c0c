"""`python -m benchmarks.gate`: is the gate right? What it promotes and holds, where the truth is known.

Simulated nights at the embedded world's real size: challengers worse by the margin, equal ones, ones that have fallen behind
the last full retrain. Planted bad challengers, trained by the product on worlds of their own. The gate's own decision code
judges all of them; what it may promote and must promote are the stated rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._planted import SMALL_WORLD, measure_planted
from benchmarks._report import Report, conclude, console, work_folder
from benchmarks._simulated import measure_simulated
from benchmarks.data import conditions

Sizes = dict[str, Any]
AS_MANY = ("source.world.num_users=400", "lake.holdout_fraction=0.5")
"""As many holdout users and rows as conf/world.toml has, drawn in a fifth of the time."""
FULL: Sizes = {
    "simulated": {"nights": 300, "overrides": AS_MANY},
    "planted": {"seeds": range(20), "days": 8, "overrides": SMALL_WORLD},
}
QUICK: Sizes = {
    "simulated": {"nights": 5, "worlds": 1, "overrides": AS_MANY},
    "planted": {
        "seeds": range(1),
        "days": 2,
        "overrides": (*SMALL_WORLD, "source.world.num_users=150"),
    },
}
PARTS: dict[str, Callable[[Report, Path, Sizes], None]] = {
    "simulated": lambda report, _, sizes: measure_simulated(report, **sizes["simulated"]),
    "planted": lambda report, work, sizes: measure_planted(report, work, **sizes["planted"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure misses its goal (never with --quick), else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="few and small nights, no goals: does it run")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="some of the parts")
    parser.add_argument("--seeds", type=int, nargs="+", help="worlds of the planted challengers (default: 0 to 19)")
    parser.add_argument("--work", type=Path, help="folder for homes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    sizes = dict(QUICK if options.quick else FULL)
    if options.seeds:
        sizes["planted"] = {**sizes["planted"], "seeds": options.seeds}
    report = Report(conditions=conditions(quick=options.quick))
    with work_folder("gate", options.work) as work:
        for name in options.only or list(PARTS):
            console.print(f"measuring {name}")
            PARTS[name](report, work, sizes)

    return conclude(report, enforce=not options.quick, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
