"""The `daybreak` command. Prefect is imported only when a flow has to run.

Exit status: 0 done, 1 failed, 2 bad usage, config or input, 3 held by the gate, 4 nothing due.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from typing import Any, NoReturn

from rich.console import Console

from flows import (
    attributing,
    checking,
    erasing,
    evaluating,
    paging,
    promoting,
    pruning,
    retraining,
    running,
    scoring,
    showing,
    up,
)
from flows.leaving import leave, unread
from flows.options import BAD_INPUT, DONE, FAILED, HELD, NOTHING_DUE, Parser, common_options
from gr_core import grouping
from gr_core.config import Config, load_config
from gr_core.environment import home_uri
from gr_core.errors import DaybreakError
from gr_core.lake import space, store

__all__ = ["BAD_INPUT", "DONE", "FAILED", "HELD", "NOTHING_DUE", "main"]


# Each has add_commands(commands, common). A command's defaults: run(options, settings, home) -> (object, exit status)
# and, unless nights are shown, show(object) -> what a person reads: a text or a table. The order is that of --help.
MODULES = (
    running,
    retraining,
    showing,
    checking,
    erasing,
    promoting,
    evaluating,
    attributing,
    paging,
    pruning,
    scoring,
    up,
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if threading.current_thread() is threading.main_thread():
        # Prefect crashes the run, then sends itself the signal again: it ends here, and servers are stopped at exit.
        signal.signal(signal.SIGTERM, _interrupt)
    home = None
    try:
        options = _parser().parse_args(words)
        settings = load_config(options.config, options.set)
        home = home_uri(settings.name, options.home)
        _warn(settings, home)
        value, status = options.run(options, settings, home)
    except DaybreakError as error:
        met = _full(home, error) or error
        return _report(met, met.exit_code, where=met.where, as_json="--json" in words)
    except KeyboardInterrupt:
        return _report(
            DaybreakError("interrupted; run it again to go on"), FAILED, where=None, as_json="--json" in words
        )
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 -- one object also for a fault of ours
        full = _full(home, error)
        status, where = (full.exit_code, full.where) if full else (FAILED, None)
        return _report(full or error, status, where=where, as_json="--json" in words)
    with unread():
        _show(options, value, home)
    return int(status)


def _full(home: str | None, error: BaseException) -> DaybreakError | None:
    """Return the full disk that an error of any library was about; None for anything else."""
    return None if home is None else space.named(home, error)


def _warn(settings: Config, home: str) -> None:
    """Say what is allowed, but was not thought through, as far as the config alone shows it."""
    uncompared = grouping.warning(settings, home)
    if uncompared is not None:
        sys.stderr.write(f"warning: {uncompared}\n")


def _interrupt(_signal: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _report(error: BaseException, status: int, *, where: str | None, as_json: bool) -> int:
    if as_json:
        body = {"error": {"type": type(error).__name__, "message": str(error), "where": where}}
        with unread():
            sys.stdout.write(json.dumps(body) + "\n")
    sys.stderr.write(f"daybreak: {type(error).__name__}: {error}\n")
    return status


def _parser() -> Parser:
    common = common_options()
    parser = Parser(prog="daybreak", description="A nightly training pipeline for generative recommenders")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in MODULES:
        module.add_commands(commands, common)
    return parser


def _show(options: argparse.Namespace, value: dict[str, Any], home: str) -> None:
    """Print the one JSON object, or the text or table that a person reads."""
    if options.json:
        sys.stdout.write(json.dumps(value) + "\n")
        return
    shown = getattr(options, "show", showing.nights_shown)(value)
    if isinstance(shown, str):
        sys.stdout.write(shown)
        return
    showing.print_whole(shown, _Table(width=None if sys.stdout.isatty() else showing.PIPED_WIDTH))
    if getattr(options, "names_home", False) and store.is_local(home):
        Console(stderr=True).print(f"home: {store.local_path(home)}", style="dim", soft_wrap=True)


class _Table(Console):
    """Rich's console, whose reader may leave: by itself it exits with 1 then, as if the command had failed."""

    def on_broken_pipe(self) -> None:
        """Leave it to `unread`."""
        raise BrokenPipeError


def command() -> NoReturn:
    """Be the `daybreak` command: run it, and end the process."""
    leave(main())


if __name__ == "__main__":
    command()
