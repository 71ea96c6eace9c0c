"""`python -m benchmarks.faults --kills N`: nights killed at random moments end as if nobody had disturbed them.

kill -9 of the whole process group at moments drawn uniformly over a night's duration, then the same command again; the
same with a kill of the run after it too, in a home's first night, and once within every stage; kills of the training
child alone; a full disk and a read-only home (on a small tmpfs, where the system lets a user mount one). Compared with
the undisturbed night: champion, versions, rows, counts, metrics, checkpoint digest, MLflow's runs and aliases.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import _disk, _faults
from benchmarks._faults import Command, Ran, Trial
from benchmarks._report import Figure, Report, conclude, console, work_folder
from gr_core.config import Config, load_config

CONFIG = _faults.ROOT / "conf" / "world.toml"
FIRST, SECOND = "2025-06-01", "2025-06-02"
SMALL = (
    "source.world.num_users=300",
    "lake.num_buckets=2",
    "lake.holdout_fraction=0.25",
    "model.width=16",
    "model.num_heads=2",
    "train.num_threads=1",
    "train.save_every_steps=10",
    "pack.token_budget=256",
    "gate.min_positives=5",
    "gate.margin=0.5",
    "gate.calibration=[0.2, 5.0]",
    "gate.insufficient_data=promote_if_sane",
    "gate.num_resamples=100",
)
PARTS = ("kills", "first", "twice", "stages", "child", "disk")
_SHARES = {"child": 10, "stages": 500}
"""The part of a night within which these kinds kill, after the child came up or the stage was reached."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """What all trials start from and are compared with."""

    base: Path
    """A home after its first night."""
    work: Path
    config: Config
    key: str
    command: Command
    calm: dict[str, Any]
    """What stands after the undisturbed second night."""
    seconds: float
    """That an undisturbed night took."""


def prepare(work: Path, config: Config, commands: Sequence[Command], keys: Sequence[str]) -> tuple[Stand, Stand]:
    """Run the first night, and the second one in a copy, both undisturbed; return the stand of each.

    Args:
        work: Folder for homes.
        config: The run's config.
        commands: Of the first and of the second night.
        keys: Theirs.
    """
    base, empty, key = work / "base", work / "empty", keys[1]
    empty.mkdir(parents=True)
    ran = _must(_faults.run(commands[0](base), work / "first"))
    stands = _faults.standing(config, base, keys[0])
    first = Stand(
        base=empty, work=work, config=config, key=keys[0], command=commands[0], calm=stands, seconds=ran.seconds
    )
    _faults.promote_first(config, base)
    calm = _faults.copy_home(base, work / "calm")
    ran = _must(_faults.run(commands[1](calm), work / "second"))
    stands = _faults.standing(config, calm, key)
    shutil.rmtree(calm)
    second = Stand(base=base, work=work, config=config, key=key, command=commands[1], calm=stands, seconds=ran.seconds)
    return first, second


def _must(ran: Ran) -> Ran:
    if ran.status not in (0, 3):
        raise SystemExit(f"the undisturbed night ended with status {ran.status}:\n{ran.log[-3000:]}")
    return ran


def disturb(stand: Stand, kind: str, seed: int, stage: str = "") -> Trial:
    """Run one trial: kills as the kind says (`stages`: within `stage`), then the night again until its end."""
    draw, trial = random.Random(seed), Trial(kind=kind, seed=seed)
    home = _faults.copy_home(stand.base, stand.work / f"{kind}-{seed}")
    runs = 2 if kind == "twice" else 1
    for attempt in range(runs):
        moment = draw.uniform(0.0, stand.seconds / _SHARES.get(kind, 1))
        kill = _faults.at_moment(moment)
        if kind == "child":
            kill = _faults.training_child(moment)
        elif kind == "stages":
            kill = _faults.in_stage(home, stand.key, stand.config.lake.num_buckets, stage, moment)
        _faults.run(stand.command(home), home.with_name(f"{home.name}.{attempt}"), kill)
        trial.moments.append(round(moment, 2))
        trial.hit.append(_faults.stage_hit(home, stand.key, stand.config.lake.num_buckets))
    last = _faults.run(stand.command(home), home.with_name(f"{home.name}.last"))
    trial.status, trial.taken_up = last.status, last.taken_up
    trial.differs = _faults.differing(stand.calm, _faults.standing(stand.config, home, stand.key))
    if last.status not in (0, 3):
        trial.differs.append(f"status {last.status}: {last.log.strip()[-300:]}")
    shutil.rmtree(home)
    console.print(
        f"{kind} seed {seed}: at {trial.moments} s hit {trial.hit}, equal {trial.equal} {trial.differs or ''}"
    )
    return trial


def table_of(trials: Sequence[Trial]) -> Table:
    """Return the trials as a table for a person."""
    table = Table("kind", "seed", "killed after (s)", "hit", "taken up by the last run", "as undisturbed")
    for one in trials:
        moments, hit = (", ".join(map(str, values)) for values in (one.moments, one.hit))
        equal = "yes" if one.equal else f"NO: {', '.join(one.differs)}"
        table.add_row(one.kind, str(one.seed), moments, hit, ", ".join(one.taken_up) or "nothing", equal)
    return table


def measure(report: Report, stand: Stand, kinds: Sequence[str], number: int, seed: int) -> None:
    """Run the trials of every kind and add their figures and their table."""
    trials: list[Trial] = []
    for kind in kinds:
        stages = _faults.STAGES if kind == "stages" else ("",) * (number if kind == "kills" else max(1, number // 4))
        wanted = len(stages)
        own = [disturb(stand, kind, seed + place, stage) for place, stage in enumerate(stages)]
        equal = sum(one.equal for one in own)
        report.figures[f"{kind}/nights_as_undisturbed"] = Figure(
            value=equal, unit=f"of {wanted} nights", at_least=wanted
        )
        trials += own
    console.print(table_of(trials))
    report.conditions.setdefault("trials", []).extend(
        {
            "kind": t.kind,
            "seed": t.seed,
            "moments": t.moments,
            "hit": t.hit,
            "taken_up": t.taken_up,
            "differs": t.differs,
        }
        for t in trials
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print, and return 1 if a figure misses its goal, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--kills", type=int, default=20, help="nights killed once; a quarter as many of other kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count on from it")
    parser.add_argument("--quick", action="store_true", help="two kills, and one of each other kind")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some of the kinds")
    parser.add_argument("--work", type=Path, help="folder for homes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    number, kinds = 2 if options.quick else options.kills, options.only or PARTS
    report = Report(conditions={"kills": number, "seed": options.seed, "config": [CONFIG.name, *SMALL]})
    config = load_config(CONFIG, list(SMALL))
    commands = [_faults.nightly(CONFIG, day, SMALL) for day in (FIRST, SECOND)]
    with work_folder("faults", options.work) as work:
        first, stand = prepare(work, config, commands, (FIRST, SECOND))
        report.conditions["night_seconds"] = round(stand.seconds, 1)
        console.print(f"undisturbed: {stand.seconds:.1f} s, champion {stand.calm['champion']}, {stand.calm['digest']}")
        for kind in [kind for kind in kinds if kind != "disk"]:
            measure(report, first if kind == "first" else stand, [kind], number, options.seed)
        if "disk" in kinds:
            _disk.measure(report, stand.base, work, stand, quick=options.quick)
    return conclude(report, enforce=True, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
