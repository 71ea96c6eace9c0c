"""What the commands' options have in common: the parser, days, versions, the runner of buckets, exit statuses."""

from __future__ import annotations

import argparse
from datetime import date as Date
from typing import Any, NoReturn

from gr_core.errors import UsageError

DONE, FAILED, BAD_INPUT, HELD, NOTHING_DUE = 0, 1, 2, 3, 4

FIRST_YEAR, LAST_YEAR = 2000, 2261  # times of other years are no events' (`data.expressions.instant`)
LAST_PORT = 65_535

Commands = argparse._SubParsersAction  # where commands are added


class Parser(argparse.ArgumentParser):
    """A parser whose errors go the way of all others: one message, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage."""
        raise UsageError(f"{message}; see {self.prog} --help")


def common_options() -> Parser:
    """Return the options that all commands take."""
    common = Parser(add_help=False, allow_abbrev=False)
    common.add_argument("--config", default="conf/world.toml", help="TOML config (default: the embedded world)")
    common.add_argument("--home", help="where state lives (default: DAYBREAK_HOME, else .daybreak/<name>)")
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a dotted config key")
    common.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    return common


def add_runner(command: argparse.ArgumentParser) -> None:
    """Add the option that says where buckets are built."""
    command.add_argument(
        "--runner", choices=("threads", "ray"), default="threads", help="where buckets are built (default: threads)"
    )


def day(text: str) -> Date:
    """Read a lake day; UsageError for anything else."""
    try:
        found = Date.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"a day is written YYYY-MM-DD, got {text!r} ({error})", where="date") from error
    if not FIRST_YEAR <= found.year <= LAST_YEAR:
        raise UsageError(f"a lake day is of the years {FIRST_YEAR} to {LAST_YEAR}, got {text}", where="date")
    return found


def version(text: str) -> int:
    """Read the number of a version or commit; UsageError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"a version is a number from 1 on, got {text!r}", where="version")
    return int(text)


def port(text: str) -> int:
    """Read a port that a server can be told; UsageError for anything else."""
    if not text.isdecimal() or not 1 <= int(text) <= LAST_PORT:
        raise UsageError(f"a port is a number from 1 to {LAST_PORT}, got {text!r}", where="port")
    return int(text)


def exit_status(night: dict[str, Any]) -> int:
    """Return a night's exit status: 0 promoted (or running elsewhere), 1 failed, 3 held, 4 nothing due."""
    if night["state"] in ("failed", "cancelled"):
        return FAILED
    if night["state"] == "no_data":
        return NOTHING_DUE
    return HELD if night.get("gate") == "held" else DONE
