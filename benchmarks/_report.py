"""What a benchmark prints: figures with goals, the conditions they were measured under (design section 7)."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from benchmarks._figures import Figure, Report

__all__ = ["Figure", "Report", "conclude", "console", "table_of", "text_of", "work_folder"]

_WIDTH = 140  # columns where there is no terminal to ask: a table in a log is not broken at 80


def _console(*, stderr: bool) -> Console:
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=_WIDTH)


console = _console(stderr=True)


@contextmanager
def work_folder(name: str, parent: Path | None) -> Iterator[Path]:
    """Make a folder for feeds and homes, and remove it at the end.

    Args:
        name: Begins the folder's name.
        parent: Where it lies, made if missing; None: in the system's temporary folder.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent) as folder:
        yield Path(folder)


def conclude(report: Report, *, enforce: bool, as_json: bool) -> int:
    """Print a benchmark's table and what missed, with `as_json` the one object on stdout; return the exit status.

    Args:
        report: All figures.
        enforce: Figures have goals.
        as_json: Nothing but the object goes to stdout.

    Returns:
        1 if a figure misses its goal, else 0.
    """
    missed = report.missed() if enforce else []
    (console if as_json else _console(stderr=False)).print(table_of(report, enforce=enforce))
    for name in missed:
        console.print(f"missed: {name} is {report.figures[name].value}, goal {report.figures[name].goal}")
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(enforce=enforce)) + "\n")
    return 1 if missed else 0


def table_of(report: Report, *, enforce: bool = True) -> Table:
    """Return the figures as a table for a terminal."""
    table = Table(Column("figure", overflow="fold"), "value", "goal", "baseline", "unit")
    for name, figure in report.figures.items():
        side = ">=" if figure.at_least is not None else "<="
        goal = f"{side} {figure.goal:g}" if enforce and figure.goal is not None else ""
        mark = " missed" if enforce and figure.is_missed else ""
        table.add_row(name, text_of(figure.value), goal + mark, text_of(figure.baseline), figure.unit)
    return table


def text_of(value: float | None) -> str:
    """Return a figure with four decimals, a large one with one; empty for None."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
