"""The commands about versions: `daybreak promote`, `daybreak rollback` and `daybreak compare`; no Prefect."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from gr_core.config import Config


def promote(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Make a version the champion; returns the object of example 7."""
    from gr_core.stages import moving

    return moving.promote(settings, home, options.version, reason=options.reason, at_us=_now_us()), 0


def rollback(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Go back to an earlier champion; returns the object of example 7."""
    from gr_core.stages import moving

    return moving.rollback(settings, home, options.to, reason=options.reason, at_us=_now_us()), 0


def compare(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Compare two versions; returns the object of example 7."""
    from gr_core.stages import comparing

    return comparing.compare(settings, home, options.a, options.b), 0


def add_commands(
    commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser, version: Callable[[str], int]
) -> None:
    """Add the commands and their options.

    Args:
        commands: Where commands are added.
        common: The options that all commands take.
        version: Reads a version's number.
    """
    up = commands.add_parser("promote", parents=[common], allow_abbrev=False, help="make a version the champion")
    up.add_argument("version", metavar="VERSION", type=version, help="number of a registered version")
    up.set_defaults(run=promote)

    back = commands.add_parser("rollback", parents=[common], allow_abbrev=False, help="go back to an earlier champion")
    back.add_argument("--to", metavar="VERSION", type=version, help="which one (default: the one before the champion)")
    back.set_defaults(run=rollback)
    for command in (up, back):
        command.add_argument("--reason", required=True, help="why, for those who read the status later")

    two = commands.add_parser("compare", parents=[common], allow_abbrev=False, help="two versions beside each other")
    two.add_argument("a", metavar="A", type=version, help="number of a registered version")
    two.add_argument("b", metavar="B", type=version, help="number of another one; differences are B - A")
    two.set_defaults(run=compare)


def told(value: dict[str, Any]) -> str:
    """Return what a person reads of promote's or rollback's object."""
    before = value["previous"]
    then = f"rollback goes to version {before}" if before is not None else "there is none before it to roll back to"
    return f"champion: version {value['champion']}; the next night starts from it; {then}\n"


def _now_us() -> int:
    return round(time.time() * 1e6)
