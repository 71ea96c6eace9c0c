"""The `page` command: a night's page, written again from the journal. Prefect is not needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from typing import Any

from gr_core.config import Config
from gr_core.lake import store


def page(options: argparse.Namespace, _settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Write the page; returns {"date", "page"}: the night and where its page lies."""
    from gr_core.stages import paging

    return paging.write(home, options.date.isoformat() if options.date else None), 0


def add_command(
    commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser, day: Callable[[str], date]
) -> None:
    """Add the command and its option.

    Args:
        commands: Where commands are added.
        common: The options that all commands take.
        day: Reads a lake day.
    """
    sheet = commands.add_parser(
        "page", parents=[common], allow_abbrev=False, help="write a night's page again, one HTML file"
    )
    sheet.add_argument("--date", type=day, help="the night's lake day (default: the newest night)")
    sheet.set_defaults(run=page)


def told(value: dict[str, Any]) -> str:
    """Return what a person reads: the page's path, or its URI where it lies on an object store."""
    uri = value["page"]
    return f"{store.local_path(uri) if store.is_local(uri) else uri}\n"
