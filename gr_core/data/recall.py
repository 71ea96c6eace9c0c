"""What a model in service would know of a user and of an item now, from rows of the event table. No storage here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from gr_core.data.timeline import in_order, timeline
from gr_core.schema import action_time


def history_columns(features: Sequence[str], action_names: Sequence[str]) -> list[str]:
    """Return the columns of the event table that `histories` reads."""
    own = ("user_id", "event_id", "shown_at", "visible_at", "actions", "known", *features)
    return list(dict.fromkeys([*own, *(action_time(name) for name in action_names)]))


def histories(
    events: pl.DataFrame,
    asked: Sequence[tuple[str, int]],
    *,
    features: Sequence[str],
    action_names: Sequence[str],
    limit: int,
) -> list[list[dict[str, Any]]]:
    """Return the newest history tokens of users, as a request of the scorer gives them: those of a night's sequences.

    Args:
        events: Rows of the event table with `history_columns`, all rows of each user who is asked for, in any order.
        asked: (user_id, shown_at in us) of each request; only what was visible before counts.
        features: Item features, item_id among them.
        action_names: The model's actions in bit order.
        limit: Most tokens of a request.

    Returns:
        A list of entries each, oldest first: features, visible_at (us), actions, known, and shown_at (us; None: a late
        action). Empty for a user without rows.
    """
    rows, user, users = in_order(events)
    line = timeline(rows, user, np.ones(len(users), np.bool_), tuple(action_names))
    place = {name: number for number, name in enumerate(users.to_list())}
    numbers = np.array([place.get(name, -1) for name, _ in asked], np.int64)
    found = numbers >= 0
    ends = np.zeros(len(asked), np.int64)
    ends[found] = line.before(numbers[found], np.array([time for _, time in asked], np.int64)[found])
    first = np.zeros(len(asked), np.int64)
    first[found] = np.maximum(line.starts[:-1][numbers[found]], ends[found] - limit)
    visible = rows["visible_at"].dt.timestamp("us").to_numpy()
    known = rows["known"].to_numpy()
    bits, texts = (1 << len(action_names)) - 1, {name: rows[name].to_list() for name in features}

    def entry(token: int) -> dict[str, Any]:
        event = int(line.event[token])
        is_late = line.time[token] > visible[event]
        return {
            **{name: column[event] for name, column in texts.items()},
            "visible_at": int(line.time[token]),
            "shown_at": None if is_late else int(line.shown[event]),
            "actions": int(line.actions[token]) & bits,
            "known": int(known[event]) & bits,
        }

    ranges = zip(first.tolist(), ends.tolist(), strict=True)
    return [[entry(token) for token in range(begin, end)] for begin, end in ranges]


def newest_features(parts: Iterable[pl.DataFrame], features: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
    """Return each item's side features at its newest event.

    Args:
        parts: Rows of the event table, a bucket each: item_id, event_id, shown_at and the features.
        features: The side features.

    Returns:
        item_id -> their values, in the order of `features`.
    """
    order = ("shown_at", "event_id")
    newest: pl.DataFrame | None = None
    for part in parts:
        both = part if newest is None else pl.concat([newest, part])
        newest = both.sort("item_id", *order).unique("item_id", keep="last", maintain_order=True)
    if newest is None:
        return {}
    values = newest.select("item_id", *features).rows()
    return {str(item): tuple(rest) for item, *rest in values}
