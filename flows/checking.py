"""The `check` command: what a night of a day would make of its raw files. Prefect is not needed."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from flows import options
from gr_core.config import Config


def check(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Check a day (default: yesterday in the lake's zone, of an embedded world its next); exit status 2 when not ok."""
    from gr_core.stages import checking, outcome

    day = asked.date
    if day is None and settings.source.world is not None:
        day = outcome.next_day(settings, home)
    if day is None:
        day = datetime.now(ZoneInfo(settings.lake.zone)).date() - timedelta(days=1)
    value = checking.check(settings, home, day)
    return value, options.DONE if value["ok"] else options.BAD_INPUT


def shown(value: dict[str, Any]) -> Any:
    """Return the tables that a person looks at."""
    from gr_core.report.checked import render_check

    return render_check(value)


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its option to those of `daybreak`; `common` are the options that all commands take."""
    look = commands.add_parser("check", parents=[common], allow_abbrev=False, help="a day's raw files, without a night")
    look.add_argument(
        "--date",
        type=options.day,
        help="lake day YYYY-MM-DD (default: yesterday in the lake's zone; of an embedded world its next)",
    )
    look.set_defaults(run=check, show=shown)
