"""What a person reads of `daybreak check`: findings, what each column becomes, the sample and the gate's power."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def render_check(value: Mapping[str, Any]) -> RenderableType:
    """Return the tables of a check.

    Args:
        value: The object of `stages.checking.check`.
    """
    parts: list[RenderableType] = [_columns(value), _sample(value)] if value["columns"] else []
    for found in value["findings"]:
        where = f" [{found['where']}]" if found["where"] not in found["message"] else ""
        parts.append(Text(f"{found['level']}: {found['message']}{where}", _STYLES[found["level"]]))
    stages = ", ".join(value["would_run"]) or "nothing"
    word = Text("ok", "green") if value["ok"] else Text("not ok", "bold red")
    parts.append(Text.assemble(f"{value['date']}: ", word, f"; a night would run: {stages}"))
    power = value["gate_power"]
    if power["standard_error"] is not None:
        parts.append(
            Text(
                f"gate: {power['users']} holdout users in {power['nights']} nights, standard error "
                f"{power['standard_error']:.2%}; an equal challenger is promoted with chance "
                f"{power['promoted_if_equal']:.2f}, one worse by the margin with {power['promoted_if_worse']:.2f}"
            )
        )
    return Group(*parts)


def _columns(value: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for name in ("feed", "column", "<- SQL", "<- raw columns", "becomes"):
        table.add_column(name)
    table.add_column("nulls", justify="right")
    table.add_column("examples")
    for column in value["columns"]:
        raw = ", ".join(f"{name} {dtype}" for name, dtype in column["raw"].items())
        cells = (column["feed"], column["column"], column["sql"], raw, column["becomes"], f"{column['nulls']:.1%}")
        # Text: an example may look like markup
        table.add_row(*(Text(cell) for cell in cells), Text(", ".join(column["examples"])))
    return table


def _sample(value: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("feed")
    for name in ("files", "rows", "sampled"):
        table.add_column(name, justify="right")
    table.add_column("break the contract")
    for one in value["sample"]:
        rows = f"{'' if one['rows_exact'] else 'about '}{one['rows']:,}"
        reasons = ", ".join(f"{reason} {count}" for reason, count in one["reasons"].items()) or "none"
        table.add_row(Text(one["feed"]), f"{one['files']:,}", rows, f"{one['sampled_rows']:,}", reasons)
    return table
