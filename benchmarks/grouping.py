"""`python -m benchmarks.grouping --config CONFIG --first DATE`: what `pack.grouping` costs in AUC on a config's own feed.

Grouped and random batches train a lineage each and a seed over the same nights, in a scratch home; the difference on the
nights' new events is written to the config's home (`gr_core.grouping`), which ends the warning. Nothing else there changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean

from benchmarks._layouts import BASE, compare, interval
from benchmarks._report import Figure, Report, conclude, work_folder
from gr_core import grouping
from gr_core.config import load_config
from gr_core.environment import home_uri
from gr_core.errors import DaybreakError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, record, print; returns 0, or 2 for a config or parameter that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouping", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--config", required=True, help="TOML config with the pack.grouping to compare")
    parser.add_argument("--first", required=True, type=date.fromisoformat, metavar="DATE", help="the first night")
    parser.add_argument(
        "--nights", type=int, default=5, help="nights of each lineage; from the third on they are judged"
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings a side, from 2 on")
    parser.add_argument("--home", help="where state lives (default: DAYBREAK_HOME, else .daybreak/<name>)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a dotted config key")
    parser.add_argument(
        "--work", type=Path, help="folder for the scratch home (default: the system's temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    try:
        return _measure(options)
    except DaybreakError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code


def _measure(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    if config.pack.grouping == "none" or options.nights < 2 or options.seeds < 2:
        raise UsageError(
            f"need pack.grouping = sorted or bucketed, --nights and --seeds from 2 on, got {config.pack.grouping!r}, "
            f"{options.nights} and {options.seeds}; name the grouping with --set pack.grouping=bucketed",
            where="pack.grouping",
        )
    arm = f"{config.pack.layout}/{config.pack.grouping}"
    plain = load_config(options.config, [*options.set, "pack.grouping=none"])
    seeds = range(options.seeds)
    with work_folder("grouping", options.work) as work:
        found = compare(
            plain,
            str(work / "home"),
            options.first,
            seeds=seeds,
            nights=options.nights,
            judged_from=min(3, options.nights),
            arms=(BASE, arm),
        )
    mean, half = interval([found[arm][seed] - found[BASE][seed] for seed in seeds])
    spread = half or 0.0
    told = {"difference": mean, "low": mean - spread, "high": mean + spread}
    home = home_uri(config.name, options.home)
    made = grouping.record(config, home, auc={config.gate.action: told}, seeds=options.seeds)
    report = Report(conditions={"auc_by_seed": found, "record": made, "home": home, "nights": options.nights})
    report.figures[f"grouping/{arm}/auc_difference"] = Figure(
        value=mean, unit=f"AUC of {config.gate.action} over {BASE}", baseline=fmean(found[BASE].values())
    )
    return conclude(report, enforce=False, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
