"""The commands about versions: `daybreak promote`, `daybreak rollback` and `daybreak compare`; no Prefect."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from flows import options
from gr_core.config import Config


def promote(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Make a version the champion; returns the object of example 7."""
    from gr_core.stages import moving

    return moving.promote(settings, home, asked.version, reason=asked.reason, at_us=_now_us()), 0


def rollback(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Go back to an earlier champion; returns the object of example 7."""
    from gr_core.stages import moving

    return moving.rollback(settings, home, asked.to, reason=asked.reason, at_us=_now_us()), 0


def compare(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Compare two versions; returns the object of example 7."""
    from gr_core.stages import comparing

    return comparing.compare(settings, home, asked.a, asked.b, tell=_say), 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the commands and their options to those of `daybreak`; `common` are the options that all commands take."""
    up = commands.add_parser("promote", parents=[common], allow_abbrev=False, help="make a version the champion")
    up.add_argument("version", metavar="VERSION", type=options.version, help="number of a registered version")
    up.set_defaults(run=promote, show=told)

    back = commands.add_parser("rollback", parents=[common], allow_abbrev=False, help="go back to an earlier champion")
    back.add_argument(
        "--to", metavar="VERSION", type=options.version, help="which one (default: the one before the champion)"
    )
    back.set_defaults(run=rollback, show=told)
    for command in (up, back):
        command.add_argument("--reason", required=True, help="why, for those who read the status later")

    two = commands.add_parser("compare", parents=[common], allow_abbrev=False, help="two versions beside each other")
    two.add_argument("a", metavar="A", type=options.version, help="number of a registered version")
    two.add_argument("b", metavar="B", type=options.version, help="number of another one; differences are B - A")
    two.set_defaults(run=compare, show=_compared)


def _compared(value: dict[str, Any]) -> Any:
    from gr_core.report.compared import render_comparison

    return render_comparison(value)


def told(value: dict[str, Any]) -> str:
    """Return what a person reads of promote's or rollback's object."""
    before = value["previous"]
    then = f"rollback goes to version {before}" if before is not None else "there is none before it to roll back to"
    return f"champion: version {value['champion']}; the next night starts from it; {then}\n"


def _now_us() -> int:
    return round(time.time() * 1e6)
