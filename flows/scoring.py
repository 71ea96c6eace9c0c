"""The `score` command: a file of requests in, a file of scores out. Prefect is not needed."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from flows import options
from gr_core.config import Config

SECONDS_BETWEEN_LINES = 2.0


class _Progress:
    """Tells on stderr, now and then, how many rows are scored."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, rows: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            sys.stderr.write(f"scored {rows:,}{'' if total is None else f' of {total:,}'} rows\n")
            self._told = now


def score(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Score a file of requests; returns the object of example 7."""
    from gr_core.stages import serving

    return serving.score(settings, home, asked.model, asked.input, asked.output, progress=_Progress()), options.DONE


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its options to those of `daybreak`; `common` are the options that all commands take."""
    command = commands.add_parser(
        "score", parents=[common], allow_abbrev=False, help="score a file of requests by a registered version"
    )
    command.set_defaults(run=score, show=told)
    command.add_argument(
        "--model", required=True, metavar="ALIAS|VERSION", help="champion, challenger, previous, or a number"
    )
    command.add_argument(
        "--input", required=True, metavar="FILE", help="requests: .parquet, .jsonl; a path or s3:// URI"
    )
    command.add_argument("--output", required=True, metavar="FILE", help="scores: .parquet, .jsonl; replaced whole")


def told(value: dict[str, Any]) -> str:
    """Return what a person reads."""
    return f"scored {value['rows']:,} rows by version {value['model_version']}: {value['output']}\n"
