"""What a person reads of `daybreak compare A B`: metrics of both versions, then what differs in data and config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_NUMBERS = 1000  # from here on a value is shown as a whole number
_HOLDOUT = "holdout"
_WITHIN = "/gauc_"


def render_comparison(value: Mapping[str, Any]) -> RenderableType:
    """Return the tables that a person reads.

    Args:
        value: The object of `gr_core.stages.comparing.compare`.
    """
    names = (f"version {value['a']}", f"version {value['b']}")
    parts: list[RenderableType] = [_metrics(value, names), Text(_basis(value), "dim")]
    if value["slices"]:
        parts.append(_slices(value["slices"], names))
    parts.append(_pairs("data", data_rows(value["data"]), names))
    config = [[key, *map(_shown, pair)] for key, pair in value["config"].items()]
    parts.append(_pairs("config", config, names) if config else Text("config: no difference"))
    return Group(*parts)


def data_rows(data: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return [what, of a, of b] of all that differs in the data; counts by dotted key."""
    a, b = (_dotted({k: v for k, v in data[side].items() if k != _HOLDOUT}) for side in ("a", "b"))
    return [
        [key, _shown(a.get(key)), _shown(b.get(key))] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)
    ]


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _basis(value: Mapping[str, Any]) -> str:
    on = value["data"]["a"][_HOLDOUT]
    if on is None:
        return "no night's holdout could be scored by both versions: each one's own figures, without differences"
    return (
        f"holdout: both versions on the same {on['events']:,} events of night {on['night']}; low and high: for NE the "
        "gate's bootstrap over users, for AUC its error over users, each end one-sided"
    )


def _metrics(value: Mapping[str, Any], names: Sequence[str]) -> Table:
    table = _table("metrics", ["metric"], [*names, "delta", "low", "high"])
    for key, found in value["metrics"].items():
        table.add_row(key, *_figures(found))
    return table


def _slices(slices: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = _table("slices", ["slice", "metric"], ["events", *names, "delta", "low", "high"])
    for one in slices:
        if _WITHIN in one["key"]:  # too wide for a terminal; --json has it
            continue
        table.add_row(one["slice"], one["key"].removeprefix(f"{_HOLDOUT}/"), f"{one['count']:,}", *_figures(one))
    return table


def _figures(found: Mapping[str, Any]) -> list[str]:
    signed = [_shown(found[key], sign="+") for key in ("delta", "low", "high")]
    return [_shown(found["a"]), _shown(found["b"]), *signed]


def _pairs(title: str, rows: Sequence[Sequence[str]], names: Sequence[str]) -> Table:
    table = _table(title, [title], list(names))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _shown(value: Any, sign: str = "") -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:{sign},.0f}" if abs(value) >= _NUMBERS else f"{value:{sign}.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:{sign},d}"
    return str(value)
