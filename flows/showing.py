"""The commands that only show: `daybreak status` and `daybreak config show`; and how nights are shown. No Prefect."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table

from flows import options
from gr_core.config import Config
from gr_core.lake.lock import RETRAIN_LOCK, running_night

PIPED_WIDTH = 10_000  # more than any table has columns: where no terminal limits it, nothing is cut or wrapped


def status(_asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Show the home's nights, champion and findings; returns the object of example 7, and 1 where a finding is an error."""
    from gr_core.stages import outcome

    today = datetime.now(ZoneInfo(settings.lake.zone)).date()
    now_us = round(datetime.now(ZoneInfo("UTC")).timestamp() * 1e6)
    live = {"running": running_night(home), "retraining": running_night(home, name=RETRAIN_LOCK)}
    value = outcome.status(settings, home, today, now_us=now_us, **live)
    failed = any(found["level"] == "error" for found in value["findings"])
    return value, options.FAILED if failed else options.DONE


def config_show(_asked: argparse.Namespace, settings: Config, _home: str) -> tuple[dict[str, Any], int]:
    """Show the resolved config; returns {"config", "fingerprint"}."""
    return {"config": settings.resolved(), "fingerprint": settings.fingerprint()}, options.DONE


def nights_shown(value: dict[str, Any]) -> str | RenderableType:
    """Return what a person reads of nights: a table, or one line for a forced stage."""
    from gr_core.report.status import render_status

    if "forced" in value:
        was, now = ([pair[side] for pair in value["forced"]["digests"]] for side in (0, 1))
        word = "equal" if value["forced"]["equal"] else f"DIFFERENT: was {was}, now {now}"
        return f"forced {value['forced']['stage']} of {value['date']}: {word}\n"
    nights = value.get("nights", [value])
    return render_status(value if "champion" in value else {"champion": None, "findings": [], "nights": nights})


def print_whole(shown: RenderableType, console: Console) -> None:
    """Print what a person reads; a table of figures that a narrow terminal has no room for is never cut.

    Rich would end figures, and whole columns, with an ellipsis. Instead the terminal breaks such a table's lines, all at one place.

    Args:
        shown: Text, a table, or a group of them.
        console: As wide as the terminal.
    """
    if isinstance(shown, Group):
        for part in shown.renderables:
            print_whole(part, console)
    elif isinstance(shown, Table) and any(column.no_wrap for column in shown.columns):
        needed = Measurement.get(console, console.options.update(width=PIPED_WIDTH), shown).maximum
        width, console.width = console.width, max(console.width, needed)
        console.print(shown)
        console.width = width
    else:
        console.print(shown)


def config_shown(value: dict[str, Any]) -> str:
    """Return what a person reads of the config: indented JSON."""
    return json.dumps(value, indent=2) + "\n"


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the commands and their options to those of `daybreak`; `common` are the options that all commands take."""
    look = commands.add_parser("status", parents=[common], allow_abbrev=False, help="nights, champion and findings")
    look.set_defaults(run=status, names_home=True)

    config = commands.add_parser("config", help="the resolved config")
    show = config.add_subparsers(required=True, metavar="ACTION").add_parser(
        "show", parents=[common], allow_abbrev=False
    )
    show.set_defaults(run=config_show, show=config_shown)
