"""`python -m benchmarks.cases`: the cases of the data plane whose right behaviour has a size, at that size.

D1 order in ten runs on 1 and 16 threads; D6 a build of 50 million events below 4 GB, one bucket at a time; E9 one user
with 200,000 events in a day; A17 a day of 20,000 files; C6 keys that appear late in JSON lines. The same functions run
at small sizes in `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _cases
from benchmarks._child import measure
from benchmarks._events import Feed, config_of, fields_of
from benchmarks._report import Figure, Report, conclude, console, work_folder
from benchmarks.data import conditions

MAX_PARAMETER_BYTES = 512 * 1024
MAX_BUILD_BYTES = 4 * 10**9
DAILY_CAP = 1000
FULL: dict[str, Any] = {
    "d1": {"num_events": 200_000, "runs": 10},
    "d6": {"feed": Feed(num_events=50_000_000, num_users=1_000_000, num_buckets=64), "sample": 100_000},
    "e9": {"feed": Feed(num_events=2_000_000), "bot": 200_000},
    "a17": {"num_files": 20_000},
    "c6": {"num_lines": 400},
}
QUICK: dict[str, Any] = {
    "d1": {"num_events": 4_000, "runs": 2},
    "d6": {"feed": Feed(num_events=100_000, num_days=30, num_users=2_000, num_buckets=4), "sample": 20_000},
    "e9": {"feed": Feed(num_events=100_000, num_days=30), "bot": 20_000},
    "a17": {"num_files": 200},
    "c6": {"num_lines": 400},
}


def case_d1(report: Report, work: Path, *, num_events: int, runs: int) -> None:
    """Every history ascending in (visible_at, event_id), targets in (shown_at, event_id), in every run and thread count."""
    root = work / "d1"
    _cases.write_ordered(root, num_events)
    found = [
        measure("benchmarks._cases:ordered", threads=n, root=str(root), home=str(work / f"d1-{n}"), runs=runs).result
        for n in (1, 16)
    ]
    digests = {digest for run in found for digest in run["digests"]}
    report.figures |= {
        "d1/segments_out_of_order": Figure(value=sum(run["disordered"] for run in found), unit="segments", at_most=0),
        "d1/distinct_results": Figure(value=len(digests), unit="packs", at_most=1),
    }
    report.conditions["d1"] = {"num_events": num_events, "runs": runs, "threads": [1, 16]}


def case_d6(report: Report, work: Path, *, feed: Feed, sample: int) -> None:
    """A full build stays below the limit, one bucket at a time, and the cut into buckets changes nothing."""
    root, home = str(work / "d6"), str(work / "d6-home")
    measure("benchmarks._events:write", root=root, feed=fields_of(feed), nights=1)
    run = measure("benchmarks._stages:data_night", root=root, home=home, feed=fields_of(feed), workers=1)
    report.figures |= {
        "d6/peak_memory_bytes": Figure(value=run.peak_bytes, unit="bytes", at_most=MAX_BUILD_BYTES),
        "d6/seconds": Figure(value=run.seconds, unit="s"),
    }
    digests = []
    small = str(work / "d6-sample")
    for buckets in (1, 8):
        shape = fields_of(Feed(num_events=sample, num_days=30, num_buckets=buckets))
        measure("benchmarks._events:write", root=small, feed=shape, nights=1)
        home = str(work / f"d6-sample-{buckets}")
        digests.append(measure("benchmarks._stages:data_night", root=small, home=home, feed=shape).result["digests"])
    differing = sum(digests[0][role] != digests[1][role] for role in digests[0])
    report.figures["d6/packs_that_differ_from_one_bucket"] = Figure(value=differing, unit="packs", at_most=0)
    report.conditions["d6"] = {"feed": fields_of(feed), "sample": sample, "build": run.result}


def case_e9(report: Report, work: Path, *, feed: Feed, bot: int) -> None:
    """Of a user with so many events in a day, the cap enters and is trained on; the memory is as without him."""
    runs, root = [], work / "e9"
    day = feed.first_night.isoformat()
    measure("benchmarks._events:write", root=str(root), feed=fields_of(feed), nights=1)
    for name in ("without", "with"):
        home = work / f"e9-{name}"
        runs.append(
            measure("benchmarks._stages:data_night", root=str(root), home=str(home), feed=fields_of(feed), workers=1)
        )
        _cases.write_bot(root, day, bot)
    without, found = runs
    targets = max(_cases.targets_of_user(work / "e9-with", "train", str(1 << 41)), default=0)
    over = found.result["reasons"].get("over_daily_cap", 0) - without.result["reasons"].get("over_daily_cap", 0)
    report.figures |= {
        "e9/events_over_the_cap_that_entered": Figure(value=bot - DAILY_CAP - over, unit="events", at_most=0),
        "e9/rows_not_counted": Figure(
            value=abs(without.result["rows"]["read"] + bot - found.result["rows"]["read"]), unit="rows", at_most=0
        ),
        "e9/loss_tokens": Figure(value=targets, unit="tokens", at_most=DAILY_CAP),
        "e9/peak_memory_ratio": Figure(
            value=found.peak_bytes / without.peak_bytes, unit="x of without the user", at_most=1.1
        ),
    }
    cap = config_of(root, feed).source.daily_cap
    report.conditions["e9"] = {"feed": fields_of(feed), "bot_events": bot, "daily_cap": cap, "with": found.result}


def case_a17(report: Report, work: Path, *, num_files: int) -> None:
    """The flow starts and ends on a day of so many files, and what its parts exchange stays small."""
    root, home = work / "a17", work / "a17-home"
    path_bytes = _cases.write_many_files(root, num_files)
    _cases.write_toml(root, work / "a17.toml")
    command = [sys.executable, "-m", "flows.cli", "nightly", "--config", str(work / "a17.toml"), "--json"]
    command += ["--home", str(home), "--date", _cases.DAY.isoformat()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    sizes = _cases.exchanged_bytes(home)
    rows = json.loads(done.stdout)["rows"] if done.returncode in (0, 3) else {"read": 0}
    report.figures |= {
        "a17/exit_code": Figure(value=done.returncode if done.returncode != 3 else 0, unit="", at_most=0),
        "a17/rows_not_read": Figure(value=2 * num_files - rows["read"], unit="rows", at_most=0),
        "a17/flow_parameter_bytes": Figure(
            value=_cases.flow_parameter_bytes(home), unit="bytes", at_most=MAX_PARAMETER_BYTES, baseline=path_bytes
        ),
        "a17/largest_result_bytes": Figure(
            value=sizes["largest_result_bytes"], unit="bytes", at_most=MAX_PARAMETER_BYTES, baseline=path_bytes
        ),
        "a17/largest_log_entry_bytes": Figure(
            value=sizes["largest_log_entry_bytes"], unit="bytes", at_most=MAX_PARAMETER_BYTES, baseline=path_bytes
        ),
    }
    report.conditions["a17"] = {"num_files": num_files, "baseline": "bytes of the files' paths", "rows": rows}


def case_c6(report: Report, work: Path, *, num_lines: int) -> None:
    """Keys that only later lines have: all lines are read by the declared types, the unknown key is told."""
    root = work / "c6"
    _cases.write_json_lines(root, num_lines)
    found = measure("benchmarks._cases:json_lines", root=str(root), home=str(work / "c6-home")).result
    report.figures |= {
        "c6/lines_not_committed": Figure(value=num_lines - found["rows"]["committed"], unit="rows", at_most=0),
        "c6/files_with_the_unknown_key": Figure(value=found["unknown_columns"].get("new", 0), unit="files", at_least=1),
    }
    report.conditions["c6"] = {"num_lines": num_lines, **found}


CASES: dict[str, Callable[..., None]] = {
    "d1": case_d1,
    "d6": case_d6,
    "e9": case_e9,
    "a17": case_a17,
    "c6": case_c6,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print, and return 1 if a figure misses its goal, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", choices=list(CASES), nargs="+", type=str.lower, help="some of the cases")
    parser.add_argument("--work", type=Path, help="folder for feeds and homes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    report = Report(conditions=conditions(quick=options.quick))
    with work_folder("cases", options.work) as work:
        for name in options.only or list(CASES):
            console.print(f"running {name}")
            CASES[name](report, work, **sizes[name])

    return conclude(report, enforce=True, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
