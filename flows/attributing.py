"""The `attribute` command: where training's time goes, on the newest finished night's pack. Prefect is not needed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from flows import options
from gr_core.config import Config
from gr_core.lake.lock import running_night


def attribute(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Measure steps; returns the object of example 7."""
    from gr_core.stages import attributing

    if running_night(home) is not None:
        sys.stderr.write("a night is running in this home: what is measured beside it is slower than alone\n")
    value = attributing.attribute(
        settings,
        home,
        steps=asked.steps if asked.steps is not None else attributing.STEPS,
        baseline=asked.baseline,
        trace=asked.trace,
    )
    return value, 0


def shown(value: dict[str, Any]) -> Any:
    """Return the tables and the chart that a person looks at."""
    from gr_core.report.attributed import render_attribution

    return render_attribution(value)


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its options to those of `daybreak`; `common` are the options that all commands take."""
    command = commands.add_parser(
        "attribute", parents=[common], allow_abbrev=False, help="where training's time goes, on the newest night's pack"
    )
    command.set_defaults(run=attribute, show=shown)
    command.add_argument("--steps", type=int, metavar="N", help="steps to measure (default: 20)")
    command.add_argument("--baseline", action="store_true", help="measure the naive settings beside it")
    command.add_argument("--trace", type=Path, metavar="FILE", help="record two steps for chrome://tracing")
