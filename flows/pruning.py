"""The `prune` command: removes what nothing needs any more, and says why the rest stays. Prefect is not needed."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import RenderableType

from flows import options
from gr_core.config import Config


def prune(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Prune the home, or tell what would go; returns the object of example 7."""
    from gr_core.environment import prepare_tools
    from gr_core.lake import store
    from gr_core.stages import pruning

    if store.exists(store.join(home, "lake")):
        prepare_tools(home)  # MLflow reads its settings from there
    at_us = round(time.time() * 1e6)
    return pruning.prune(settings, home, at_us=at_us, keep=asked.keep, dry_run=asked.dry_run), options.DONE


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its options to those of `daybreak`; `common` are the options that all commands take."""
    away = commands.add_parser(
        "prune", parents=[common], allow_abbrev=False, help="remove checkpoints, packs and old files that nothing needs"
    )
    away.add_argument("--dry-run", action="store_true", help="only say what would go, and why the rest stays")
    away.add_argument("--keep", type=int, metavar="K", help="newest versions that stay (default: prune.keep_versions)")
    away.set_defaults(run=prune, show=told, names_home=True)


def told(value: dict[str, Any]) -> RenderableType:
    """Return what a person reads: what goes with its bytes, and what stays with the reason."""
    from gr_core.report.pruned import render_pruned

    return render_pruned(value)
