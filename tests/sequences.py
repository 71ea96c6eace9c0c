"""Events of a few users in seconds, and the sequences built of them."""

from __future__ import annotations

from typing import Any

import polars as pl

from gr_core.data.sequences import SequenceRules, Sequences, build_sequences

US = 1_000_000
ACTIONS = ("click", "like")
TIME = pl.Datetime("us", "UTC")


def rules(**changes: Any) -> SequenceRules:
    """Return wide limits with a test's changes."""
    values: dict[str, Any] = {
        "action_names": ACTIONS,
        "features": ("item_id", "surface"),
        "item_features": ("item_id",),
        "max_history": 128,
        "max_targets": 64,
        "max_age_us": 360 * 86_400 * US,
        "token_budget": 8192,
    }
    return SequenceRules(**{**values, **changes})


def table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Make event rows; times in seconds, actions as {name: second or None}, visible 1800 s after shown."""
    return pl.DataFrame(
        {
            "event_id": [row["id"] for row in rows],
            "user_id": [row["user"] for row in rows],
            "item_id": [row["item"] for row in rows],
            "shown_at": [row["shown"] * US for row in rows],
            "visible_at": [row.get("visible", row["shown"] + 1800) * US for row in rows],
            "actions": [sum(1 << ACTIONS.index(name) for name in row.get("taken", {})) for row in rows],
            "known": [row.get("known", 0b11) for row in rows],
            **{
                f"{name}_at": [
                    None if row.get("taken", {}).get(name) is None else row["taken"][name] * US for row in rows
                ]
                for name in ACTIONS
            },
            "surface": [row.get("surface", "home") for row in rows],
            "due": [row.get("due", 0) for row in rows],
        },
        schema={
            **dict.fromkeys(("event_id", "user_id", "item_id"), pl.String),
            **dict.fromkeys(("shown_at", "visible_at"), TIME),
            **dict.fromkeys(("actions", "known"), pl.Int32),
            **dict.fromkeys((f"{name}_at" for name in ACTIONS), TIME),
            "surface": pl.String,
            "due": pl.Int32,
        },
    )


def build(events: pl.DataFrame, **changes: Any) -> Sequences:
    """Build the sequences of events, their own column `due` telling the targets."""
    return build_sequences(events, events["due"], rules(**changes))
