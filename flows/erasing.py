"""The commands that take data out of a home again: `daybreak forget` and `daybreak retract`; no Prefect."""

from __future__ import annotations

import argparse
import time
from typing import Any

from flows import options
from gr_core.config import Config
from gr_core.lake import store


def forget(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Erase a user; returns the object of example 7."""
    from gr_core.night import resolve_root
    from gr_core.stages import erasing

    store.delta_uri(home)  # refuses a home that Delta cannot hold, before anything is made in it
    return erasing.forget(resolve_root(settings, home), home, asked.user, at_us=_now_us()), 0


def retract(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Take back one ingestion; returns the object of example 7."""
    from gr_core.stages import erasing

    value = erasing.retract(settings, home, date=asked.date, commit=asked.commit, reason=asked.reason, at_us=_now_us())
    return value, 0


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the commands and their options to those of `daybreak`; `common` are the options that all commands take."""
    erase = commands.add_parser(
        "forget", parents=[common], allow_abbrev=False, help="erase a user, and keep him out from now on"
    )
    erase.add_argument("user", metavar="USER", help="the user's id as the raw feed has it")
    erase.set_defaults(run=forget, show=told)

    back = commands.add_parser(
        "retract", parents=[common], allow_abbrev=False, help="take back a day that went wrong, and what it trained"
    )
    back.add_argument("--date", type=options.day, help="the lake day whose ingestion is taken back")
    back.add_argument("--commit", type=options.version, metavar="N", help="or the number of the ingestion")
    back.add_argument("--reason", required=True, help="why, for those who read the status later")
    back.set_defaults(run=retract, show=told)


def told(value: dict[str, Any]) -> str:
    """Return what a person reads of either command's object."""
    if "tainted" in value:
        what = f"the ingestion of {value['date']}" if "date" in value else f"commit {value['commit']}"
        tainted = ", ".join(map(str, value["tainted"])) or "none"
        parent = value["next_parent"]
        start = f"version {parent}" if parent is not None else "no parent, as a first night"
        return (
            f"retracted {what}: {value['rows']:,} rows to quarantine ({value['reason']})\n"
            f"tainted versions: {tainted}; the next night starts from {start}\n"
        )
    rows = ", ".join(f"{kind} {count:,}" for kind, count in value["rows"].items())
    lines = [f"removed: {rows}", "still held by:"]
    lines += [f"  {held['what']}\n      until {held['until']}" for held in value["still_held_by"]]
    return "\n".join(lines) + "\n"


def _now_us() -> int:
    return round(time.time() * 1e6)
