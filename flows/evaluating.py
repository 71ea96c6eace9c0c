"""The `evaluate` command: a model on the new events of a finished night. Prefect is not needed."""

from __future__ import annotations

import argparse
from typing import Any

from flows import options
from gr_core.config import Config


def evaluate(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Score a model; returns the object of example 7."""
    from gr_core.stages import reevaluating

    return reevaluating.evaluate_model(settings, home, asked.model, asked.date), options.DONE


def shown(value: dict[str, Any]) -> Any:
    """Return the table that a person looks at."""
    from gr_core.report.evaluated import render_evaluation

    return render_evaluation(value)


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its options to those of `daybreak`; `common` are the options that all commands take."""
    command = commands.add_parser(
        "evaluate", parents=[common], allow_abbrev=False, help="a model on a finished night's new events"
    )
    command.add_argument(
        "--model",
        metavar="ALIAS|VERSION|CHECKPOINT",
        default="champion",
        help="champion, challenger or previous, a version's number, or a checkpoint's folder (default: champion)",
    )
    command.add_argument("--date", type=options.day, help="lake day YYYY-MM-DD (default: the newest finished night's)")
    command.set_defaults(run=evaluate, show=shown)
