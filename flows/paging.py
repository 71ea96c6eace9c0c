"""The `page` command: a night's page, written again from the journal. Prefect is not needed."""

from __future__ import annotations

import argparse
from typing import Any

from flows import options
from gr_core.config import Config
from gr_core.lake import store


def page(asked: argparse.Namespace, _settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Write the page; returns {"date", "page"}: the night and where its page lies."""
    from gr_core.stages import paging

    return paging.write(home, asked.date.isoformat() if asked.date else None), 0


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its option to those of `daybreak`; `common` are the options that all commands take."""
    sheet = commands.add_parser(
        "page", parents=[common], allow_abbrev=False, help="write a night's page again, one HTML file"
    )
    sheet.add_argument("--date", type=options.day, help="the night's lake day (default: the newest night)")
    sheet.set_defaults(run=page, show=told)


def told(value: dict[str, Any]) -> str:
    """Return what a person reads: the page's path, or its URI where it lies on an object store."""
    uri = value["page"]
    return f"{store.local_path(uri) if store.is_local(uri) else uri}\n"
