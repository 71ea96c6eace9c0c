"""What a person reads of `daybreak evaluate`: a line an action and set of events, with intervals. Values in, tables out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SETS = {"next_day": "next day", "late_events": "late"}
_METRICS = ("auc", "ne", "calibration", "log_loss", "count", "positives")


def metric_rows(value: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row of text for each set of events and action: events, action, metrics; AUC and NE with intervals.

    Args:
        value: The object of `gr_core.stages.reevaluating.evaluate_model`.
    """
    metrics = value["metrics"]
    found = []
    for role, name in SETS.items():
        actions = [key.split("/")[2] for key in metrics if key.startswith(f"{role}/count/")]
        for action in actions:
            if role == "late_events" and not metrics[f"{role}/count/{action}"]:
                continue
            cells = {key: _cell(metrics, role, key, action) for key in _METRICS}
            found.append({"events": name, "action": action, **cells})
    return found


def _cell(metrics: Mapping[str, Any], role: str, key: str, action: str) -> str:
    found = metrics.get(f"{role}/{key}/{action}")
    ends = [metrics.get(f"{role}/{key}_{end}/{action}") for end in ("low", "high")]
    return _shown(found) + (f" [{_shown(ends[0])}, {_shown(ends[1])}]" if None not in ends else "")


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def sentence(value: Mapping[str, Any]) -> str:
    """Return what was scored on what, and whether the model knew any of it."""
    who = f"version {value['version']}" if value["version"] is not None else f"checkpoint {value['model']}"
    alias = f" ({value['model']})" if value["version"] is not None and value["model"] != str(value["version"]) else ""
    knew = "; it was TRAINED on some of them" if value["trained_on"] else "; it was trained on none of them"
    return f"{who}{alias} on the {value['count']:,} new events of {value['date']}{knew}"


def render_evaluation(value: Mapping[str, Any]) -> RenderableType:
    """Return the table that a person reads.

    Args:
        value: The object of `gr_core.stages.reevaluating.evaluate_model`.
    """
    table = Table(title=sentence(value), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("events", no_wrap=True)
    table.add_column("action", no_wrap=True)
    for key in _METRICS:
        table.add_column(key, justify="right", no_wrap=True)
    for row in metric_rows(value):
        table.add_row(*row.values())
    note = "next day: shown after all that the model was trained on; late: the others. Intervals: 95 %, over users"
    return Group(table, Text(note, "dim"))
