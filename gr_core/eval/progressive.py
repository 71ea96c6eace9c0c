"""Progressive validation: a night's new events, scored by a model that has trained on none of them.

Those shown after the newest event that the model was supervised on for that action are `next_day`: honest
predictions of the future. The others, late events, are from a time that the model has seen; they are counted and
measured apart and stay out of drift and gate. Each (event, action) is new once ever, so each counts once ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gr_core.eval.metrics import KEYS, ScoredRows, evaluate, metric_keys, supervised_bits
from gr_core.refs import NEVER


def next_day_metrics(
    scored: ScoredRows, newest_supervised_us: Mapping[str, int], action_names: Sequence[str], supervised: int
) -> dict[str, Any]:
    """Split new events at what the scoring model was supervised on, per action, and measure both parts.

    Args:
        scored: The new events with the model's logits; N rows.
        newest_supervised_us: Action -> newest shown_at supervised along the model's lineage; an action that is
            absent was never supervised: its events are next_day and counted, but its logits mean nothing, so its
            metrics are None.
        action_names: All A action names in bit order.
        supervised: Mask of the supervised actions.

    Returns:
        {"next_day": {action: metrics}, "late": {action: metrics}, "new_events": events with a new action,
        "late_events": events with a new action that stays out of next_day}. Metrics are those of
        `metrics.binary_metrics`.
    """
    known = np.asarray(scored.label_known)
    time = np.asarray(scored.time)
    late = np.zeros_like(known)
    mask = 0
    for name, bit in supervised_bits(action_names, supervised).items():
        mask |= 1 << bit
        is_late = time <= newest_supervised_us.get(name, NEVER)
        late |= np.where(is_late, known & (1 << bit), 0).astype(known.dtype)
    fresh = known & ~late
    next_day = evaluate(scored.labels, fresh, scored.logits, action_names, supervised)
    for name in next_day.keys() - newest_supervised_us.keys():
        next_day[name] = {**next_day[name], **dict.fromkeys(KEYS)}
    return {
        "next_day": next_day,
        "late": evaluate(scored.labels, late, scored.logits, action_names, supervised),
        "new_events": int(np.count_nonzero(known & mask)),
        "late_events": int(np.count_nonzero(late)),
    }


def unscored(num_new_events: int | None, action_names: Sequence[str], supervised: int) -> dict[str, Any]:
    """Return the same object for a night without a parent: nothing scored its new events; None: not counted here."""
    none = np.zeros(0, np.int32)
    empty = evaluate(none, none, np.zeros((0, len(action_names)), np.float32), action_names, supervised)
    return {"next_day": empty, "late": dict(empty), "new_events": num_new_events, "late_events": 0}


def progressive_keys(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result's flat metric keys: next_day/<metric>/<action>, late_events/<metric>/<action>, and counts."""
    return {
        **metric_keys("next_day", result["next_day"]),
        **metric_keys("late_events", result["late"]),
        "next_day/new_events": result["new_events"],
        "late_events/events": result["late_events"],
    }
