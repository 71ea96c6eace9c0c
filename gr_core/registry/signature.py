"""Signature and input example of a registered model: `score --input` of examples 9, as MLflow's schema JSON.

Ids, times and features are of type "any": ids may be text or integers, times may carry a zone (MLflow's datetime
refuses both zones and times inside lists), and MLflow checks an "any" in no time where a typed value inside a list
costs it 0.1 ms each. Lists are ragged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Columns = list[dict[str, Any]]
ANY: dict[str, Any] = {"type": "any"}


def schema(state: Mapping[str, Any]) -> dict[str, Columns]:
    """Return {"inputs", "outputs"} of a checkpoint's state.json."""
    items, context = _features(state)
    # shown_at is read where item and action alternate; elsewhere it is taken and ignored, so that one client serves both
    names = ("item_id", "shown_at", "visible_at", "actions", "known", *items)
    token = {name: {**ANY, "required": False} for name in names}
    many = {"type": "array", "items": ANY}
    inputs: Columns = [
        {"name": "request_id", **ANY, "required": False},
        {"name": "user_id", **ANY, "required": False},
        {"name": "shown_at", **ANY, "required": False},
        {"name": "history", "type": "array", "items": {"type": "object", "properties": token}, "required": False},
        {"name": "candidates", **many, "required": True},
        *({"name": f"candidate_{name}", **many, "required": False} for name in items),
        *({"name": name, **ANY, "required": False} for name in context),
    ]
    scores = {"type": "array", "items": {"type": "float"}, "required": True}
    return {"inputs": inputs, "outputs": [{"name": f"scores_{action}", **scores} for action in state["supervised"]]}


def example(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return two requests with histories and candidates of unequal lengths; ids that no vocabulary needs to know."""
    items, context = _features(state)
    known = (1 << len(state["actions"])) - 1

    def token(minute: int) -> dict[str, Any]:
        when = f"2025-06-01T12:{minute:02d}:00Z"
        side = dict.fromkeys(items, "example")
        if interleaves(state):
            side["shown_at"] = when
        return {"item_id": f"item-{minute}", "visible_at": when, "actions": minute % 2, "known": known, **side}

    return [
        {
            "request_id": f"request-{number}",
            "user_id": f"user-{number}",
            "shown_at": "2025-06-01T13:00:00Z",
            "history": [token(minute) for minute in range(length)],
            "candidates": [f"item-{minute}" for minute in range(count)],
            **{f"candidate_{name}": ["example"] * count for name in items},
            **dict.fromkeys(context, "example"),
        }
        for number, (length, count) in enumerate([(3, 2), (5, 3)])
    ]


def interleaves(state: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint was trained on item, action, item, action."""
    return bool((state["config"].get("pack") or {}).get("tokens") == "interleaved")


def _features(state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the side features of items and the context features."""
    model = state["config"]["model"]
    items = [name for name in model.get("item_features", ["item_id"]) if name != "item_id"]
    return items, list(model.get("context_features", []))
