"""What a person reads of `daybreak prune`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_KB = 1000


def render_pruned(value: Mapping[str, Any]) -> RenderableType:
    """Return two tables: what goes or went, and what stays.

    Args:
        value: The object of `gr_core.stages.pruning.prune`.
    """
    total = sum(one["bytes"] for one in value["removed"])
    verb = "would go" if value["dry_run"] else "removed"
    gone, stays = _table(verb, "size"), _table("kept", "why")
    gone.columns[1].justify = "right"
    for one in value["removed"]:
        gone.add_row(one["what"], readable_bytes(one["bytes"]))
    for one in value["kept"]:
        stays.add_row(one["what"], one["why"])
    parts: list[RenderableType] = [stays] if value["kept"] else []
    parts += [gone] if value["removed"] else []
    parts.append(Text(f"{verb}: {readable_bytes(total)}" if value["removed"] else "nothing to prune"))
    if value["dry_run"] and value["removed"]:
        parts.append(Text("nothing was removed; run it without --dry-run", "dim"))
    return Group(*parts)


def readable_bytes(number: int) -> str:
    """Return a number of bytes in the largest decimal unit that leaves at least 1."""
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < _KB:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KB
    return f"{size:.1f} TB"


def _table(first: str, second: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first)
    table.add_column(second)
    return table
