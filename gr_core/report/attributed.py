"""What a person reads of `daybreak attribute`: where a step's time goes, as table and chart, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_BAR = 40  # columns of the whole step
_COLOURS = {"forward": "green", "backward": "cyan", "optimizer": "magenta", "data_wait": "yellow", "metrics": "blue"}
PARTS = tuple(_COLOURS)  # those of gr_core.train.attribution, which needs torch
_OTHER = "other"

# perf key -> (what a person calls it, format)
_FIGURES: dict[str, tuple[str, str]] = {
    "perf/tokens_per_second": ("tokens a second, without padding", "{:,.0f}"),
    "perf/mfu": ("model FLOP utilisation", "{:.1%}"),
    "perf/peak_flops_per_second": ("peak, FLOP/s", "{:.3g}"),
    "perf/padding_fraction": ("attention's places without a token", "{:.1%}"),
    "perf/unused_budget_fraction": ("token budget unused", "{:.1%}"),
    "perf/attention_flops_fraction": ("FLOP in attention", "{:.1%}"),
    "perf/launches_per_step": ("kernel launches a step", "{:,.0f}"),
    "perf/ops_per_step": ("operators a step", "{:,.0f}"),
    "perf/host_syncs_per_step": ("waits of the host a step", "{:,.0f}"),
    "perf/compiled_graphs": ("compiled graphs", "{:,.0f}"),
    "perf/recompiles": ("recompilations", "{:,.0f}"),
    "perf/peak_memory_bytes": ("most memory held, bytes", "{:,.0f}"),
    "perf/gpu_seconds": ("GPU seconds", "{:,.1f}"),
    "perf/core_seconds": ("core seconds", "{:,.1f}"),
    "perf/cost": ("cost", "{:,.4f}"),
}


def measured(trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a night's training as the object of `stages.attributing.attribute`; None where it measured no steps.

    Args:
        trained: What its training stage returned.
    """
    perf = {key: value for key, value in trained["metrics"].items() if key.startswith("perf/") and value is not None}
    seconds = {part: perf[f"perf/seconds/{part}"] for part in PARTS if f"perf/seconds/{part}" in perf}
    if not perf.get("perf/steps") or len(seconds) < len(PARTS):
        return None
    return {"steps": int(perf["perf/steps"]), "seconds": seconds, "perf": perf, "advice": trained.get("advice", [])}


def split(value: Mapping[str, Any]) -> dict[str, float]:
    """Return milliseconds a step by part, the rest of its wall time included."""
    steps = max(value["steps"], 1)
    seconds = {**value["seconds"], _OTHER: value["perf"].get("perf/other_seconds", 0.0)}
    return {part: 1000 * spent / steps for part, spent in seconds.items()}


def split_rows(value: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the split as rows of text: part, milliseconds a step, share."""
    parts = split(value)
    whole = sum(parts.values()) or 1.0
    return [{"part": part, "ms_a_step": f"{ms:.2f}", "share": f"{ms / whole:.1%}"} for part, ms in parts.items()]


def figure_rows(value: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what else was measured as rows of text: figure, value."""
    perf = value["perf"]
    return [{"figure": name, "value": form.format(perf[key])} for key, (name, form) in _FIGURES.items() if key in perf]


def advice_rows(value: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return advice as rows of text: action, expected_saving."""
    return [
        {"action": one["action"], "expected_saving": f"{one['expected_saving_fraction']:.1%}"}
        for one in value["advice"]
    ]


def render_attribution(value: Mapping[str, Any]) -> RenderableType:
    """Return the tables of a measured run, the naive settings beside it where they were measured.

    Args:
        value: The object of `stages.attributing.attribute`.
    """
    sides = {"this config": value} | ({"naive": value["baseline"]} if value.get("baseline") else {})
    parts: list[RenderableType] = [_chart(sides), _figures(sides)]
    if len(sides) == 2:
        ours, theirs = (side["perf"]["perf/tokens_per_second"] for side in sides.values())
        parts.append(
            Text(f"this config trains {ours / theirs:.2f} times as many tokens a second as the naive settings")
        )
    parts.append(_advice(value))
    return Group(*parts)


def _chart(sides: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("part")
    longest = max(sum(split(side).values()) for side in sides.values()) or 1.0
    for name in sides:
        table.add_column(f"{name}: ms a step", justify="right")
        table.add_column("", min_width=_BAR)
    splits = [split(side) for side in sides.values()]
    for part in splits[0]:
        cells: list[Text] = [Text(part)]
        for one in splits:
            cells += [Text(f"{one[part]:.2f}"), _bar(one[part] / longest, _COLOURS.get(part, "white"))]
        table.add_row(*cells)
    totals: list[Text] = [Text("step", "bold")]
    for one in splits:
        whole = sum(one.values())
        totals += [Text(f"{whole:.2f}", "bold"), _bar(whole / longest, "bold")]
    table.add_row(*totals)
    return table


def _bar(fraction: float, style: str) -> Text:
    return Text("█" * round(_BAR * fraction), style)


def _figures(sides: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("figure")
    for name in sides:
        table.add_column(name, justify="right")
    columns = [{row["figure"]: row["value"] for row in figure_rows(side)} for side in sides.values()]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def _advice(value: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("saves about", justify="right")
    table.add_column("advice")
    for row in advice_rows(value):
        table.add_row(row["expected_saving"], Text(row["action"]))
    return table
