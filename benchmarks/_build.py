"""The full build of a generated feed and one more night on top, against Polars and pandas on the same rows.

Each part runs in a process of its own (see _child.measure), whose module imports nothing that its part does not need:
_yardstick Polars, _groupby pandas, _grouping and _stages the product. Nights are its data stages without training.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks._child import Measured, measure
from benchmarks._events import Feed, fields_of, files_of
from benchmarks._report import Figure, Report

MAX_BUILD_RATIO = 3.0
MAX_NIGHT_RATIO = 0.15
MIN_SPEEDUP, MAX_MEMORY_RATIO = 8.0, 1 / 3
MAX_LARGE_BYTES = 6 * 2**30
SETTLED = 3
"""The night after the build that is measured. Until gate.nights (3) nights are finished, the gate's window is all that
ever came due to holdout users, the history included; from this night on it is the last three nights."""


def measure_build(report: Report, work: Path, feed: Feed) -> None:
    """Add the figures of the full build and of a night on top of it, the first whose gate judges nights only.

    The yardstick is run before and after them, in processes of its own; the ratio is to the mean of the two.
    """
    root, home = work / "raw", work / "home"
    written = measure("benchmarks._events:write", root=str(root), feed=fields_of(feed), nights=1 + SETTLED)
    yardsticks = [_sorted(work)]
    built = _night(home, root, feed, 0)
    *early, night = [_night(home, root, feed, number) for number in range(1, 1 + SETTLED)]
    yardsticks.append(_sorted(work))

    yardstick = sum(run.seconds for run in yardsticks) / len(yardsticks)
    report.figures |= {
        "build/ratio_to_sort": Figure(
            value=built.seconds / yardstick, unit="x of Polars' read, sort, write", at_most=MAX_BUILD_RATIO
        ),
        "build/seconds": Figure(value=built.seconds, unit="s", baseline=yardstick),
        "build/peak_memory_bytes": Figure(
            value=built.peak_bytes, unit="bytes", baseline=max(run.peak_bytes for run in yardsticks)
        ),
        "night/ratio_to_sort": Figure(
            value=night.seconds / yardstick, unit="x of Polars' read, sort, write", at_most=MAX_NIGHT_RATIO
        ),
        "night/seconds": Figure(value=night.seconds, unit="s", baseline=yardstick),
        "night/peak_memory_bytes": Figure(value=night.peak_bytes, unit="bytes"),
    }
    report.conditions["build"] = {
        "feed": fields_of(feed) | written.result,
        "generator_seconds": written.seconds,
        "yardstick": "polars.read_parquet of the same files, sort by (user, time), write_parquet; mean of two runs",
        "yardstick_seconds": [run.seconds for run in yardsticks],
        "full_build": _told(built),
        "early_nights": [_told(run) for run in early],
        "night": _told(night),
    }
    shutil.rmtree(home)


def measure_pandas(report: Report, work: Path, feed: Feed) -> None:
    """Add the figures of grouping events into sequences a user against a pandas groupby of them into lists."""
    root, home = work / "raw-pandas", work / "home-pandas"
    ours_in: dict[str, Any] = {"root": str(root), "home": str(home), "feed": fields_of(feed)}
    measure("benchmarks._events:write", root=str(root), feed=fields_of(feed), nights=1)
    measure("benchmarks._grouping:ingest", **ours_in)
    theirs = measure("benchmarks._groupby:group_with_pandas", files=files_of(str(root)))
    ours = measure("benchmarks._grouping:group", **ours_in)
    stage = measure("benchmarks._grouping:sequences", **ours_in)
    report.figures |= {
        "pandas/speedup": Figure(
            value=theirs.seconds / ours.seconds, unit="x of the pandas groupby", at_least=MIN_SPEEDUP
        ),
        "pandas/memory_ratio": Figure(
            value=ours.peak_bytes / theirs.peak_bytes, unit="x of the pandas groupby", at_most=MAX_MEMORY_RATIO
        ),
        "pandas/seconds": Figure(value=ours.seconds, unit="s", baseline=theirs.seconds),
        "pandas/peak_memory_bytes": Figure(value=ours.peak_bytes, unit="bytes", baseline=theirs.peak_bytes),
        "pandas/whole_stage_seconds": Figure(value=stage.seconds, unit="s", baseline=theirs.seconds),
    }
    report.conditions["pandas"] = {
        "feed": fields_of(feed),
        "pandas": "read_parquet, sort_values (user, time), groupby(user).agg(list) of item, category, surface, actions, time",
        "ours": "event table to sequences in memory, everything a target; buckets side by side, each dropped when built",
        "whole_stage": "all three roles, their files and the history store",
        "runs": {"pandas": _told(theirs), "ours": _told(ours), "whole_stage": _told(stage)},
    }
    shutil.rmtree(home)
    shutil.rmtree(root)


def measure_large(report: Report, work: Path, feed: Feed) -> None:
    """Add the peak memory of one night on top of a large table, its history being context only."""
    root, home = work / "raw-large", work / "home-large"
    written = measure("benchmarks._events:write", root=str(root), feed=fields_of(feed), nights=2)
    first = _night(home, root, feed, 0, bootstrap_due=False)
    night = _night(home, root, feed, 1, bootstrap_due=False)
    report.figures |= {
        "large/night_peak_memory_bytes": Figure(value=night.peak_bytes, unit="bytes", at_most=MAX_LARGE_BYTES),
        "large/night_seconds": Figure(value=night.seconds, unit="s"),
        "large/bootstrap_peak_memory_bytes": Figure(value=first.peak_bytes, unit="bytes"),
    }
    report.conditions["large"] = {
        "feed": fields_of(feed) | written.result,
        "bootstrap": _told(first),
        "night": _told(night),
    }
    shutil.rmtree(home)
    shutil.rmtree(root)


def _sorted(work: Path) -> Measured:
    files = files_of(str(work / "raw"))
    return measure("benchmarks._yardstick:sort_by_user", files=files, out=str(work / "sorted.parquet"))


def _night(home: Path, root: Path, feed: Feed, number: int, *, bootstrap_due: bool = True) -> Measured:
    return measure(
        "benchmarks._stages:data_night",
        root=str(root),
        home=str(home),
        feed=fields_of(feed),
        number=number,
        bootstrap_due=bootstrap_due,
    )


def _told(run: Measured) -> dict[str, Any]:
    return {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "peak_bytes": run.peak_bytes, **run.result}
