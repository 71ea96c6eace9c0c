"""Progressive validation: a night's new events, scored by a model that has trained on none of them.

Those shown after the newest event that the model was supervised on for that action are `next_day`: honest
predictions of the future. The others, late events, are from a time that the model has seen; they are counted and
measured apart and stay out of drift and gate. Each (event, action) is new once ever, so each counts once ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gr_core.eval.drift import histogram
from gr_core.eval.metrics import KEYS, Array, ScoredRows, evaluate, metric_keys, supervised_bits
from gr_core.eval.slices import Row, Slicing, measure
from gr_core.eval.spread import standard_errors
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
    mask = sum(1 << bit for bit in supervised_bits(action_names, supervised).values())
    late = _late(scored, newest_supervised_us, action_names, supervised)
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


def _late(
    scored: ScoredRows, newest_supervised_us: Mapping[str, int], action_names: Sequence[str], supervised: int
) -> Array:
    """Return which known labels are of a time that the model has seen, masks [N]."""
    known, time = np.asarray(scored.label_known), np.asarray(scored.time)
    late = np.zeros_like(known)
    for name, bit in supervised_bits(action_names, supervised).items():
        is_late = time <= newest_supervised_us.get(name, NEVER)
        late |= np.where(is_late, known & (1 << bit), 0).astype(known.dtype)
    return late


def next_day_errors(
    scored: ScoredRows, newest_supervised_us: Mapping[str, int], action_names: Sequence[str], supervised: int
) -> dict[str, dict[str, float | None]]:
    """Return the standard errors, over users, of the AUC and NE that `next_day_metrics` gives for the same scores.

    Args:
        scored: As there, with logits of W or A columns.
        newest_supervised_us: As there.
        action_names: As there.
        supervised: As there.

    Returns:
        {action: `spread.standard_errors`}, of the actions that were measured at all.
    """
    fresh = np.asarray(scored.label_known) & ~_late(scored, newest_supervised_us, action_names, supervised)
    bits = supervised_bits(action_names, supervised)
    narrow = np.shape(scored.logits)[1] == len(bits)
    _, users = np.unique(np.asarray(scored.users, dtype=str), return_inverse=True)
    found = {}
    for place, (name, bit) in enumerate(bits.items()):
        if name in newest_supervised_us:
            rows = (fresh >> bit & 1).astype(bool)
            scores = np.asarray(scored.logits)[rows, place if narrow else bit]
            found[name] = standard_errors(np.asarray(scored.labels)[rows] >> bit & 1, scores, users[rows])
    return found


def next_day_slices(
    scored: ScoredRows,
    newest_supervised_us: Mapping[str, int],
    action_names: Sequence[str],
    supervised: int,
    slicings: Sequence[Slicing],
) -> list[Row]:
    """Return what `slices.measure` finds of the same labels that `next_day_metrics` counts as next_day.

    Args:
        scored: As there.
        newest_supervised_us: As there.
        action_names: As there.
        supervised: As there.
        slicings: How the N rows are parted.
    """
    late = _late(scored, newest_supervised_us, action_names, supervised)
    fresh, never = np.asarray(scored.label_known) & ~late, set(action_names) - newest_supervised_us.keys()
    return measure(scored, slicings, action_names, supervised, known=fresh, unmeasured=never)


def score_bins(
    scored: ScoredRows, newest_supervised_us: Mapping[str, int], action_names: Sequence[str], supervised: int
) -> dict[str, list[int]]:
    """Return the histogram (`drift.histogram`) of the logits that `next_day_metrics` measures, by action.

    Args:
        scored: As there.
        newest_supervised_us: As there; an action that is absent has none.
        action_names: As there.
        supervised: As there.
    """
    fresh = np.asarray(scored.label_known) & ~_late(scored, newest_supervised_us, action_names, supervised)
    bits = supervised_bits(action_names, supervised)
    logits = np.asarray(scored.logits)
    narrow = logits.shape[1] == len(bits)
    return {
        name: histogram(logits[(fresh >> bit & 1).astype(bool), place if narrow else bit])
        for place, (name, bit) in enumerate(bits.items())
        if name in newest_supervised_us
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
