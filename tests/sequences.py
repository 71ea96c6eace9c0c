"""Events of a few users in seconds, and the sequences built of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from gr_core.data.interleaved import InterleavedSource
from gr_core.data.ragged import FIRST_CODE, RaggedSource
from gr_core.data.sequences import SequenceRules, Sequences, build_sequences
from gr_core.data.vocabulary import Vocabulary, dictionary, merge_counts, rows_of

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


@dataclass(frozen=True)
class Decoded:
    """Sequences of one role as frames: a row a token, a row a segment."""

    tokens: pl.DataFrame
    """Features as text, the pack's columns with segment-relative lo and hi, event_id (null on history tokens)."""
    segments: pl.DataFrame
    """user_id, length, num_targets."""


def decoded(built: Sequences, role: int = 1) -> Decoded:
    """Write out the tokens of a role, given by its bit."""
    codes = {name: np.arange(FIRST_CODE + len(ids), dtype=np.int32) for name, ids in built.ids.items()}
    source = _source([built], [codes], role)
    columns, events = source.take(np.arange(len(source.lengths)))
    texts = {
        name: pl.Series([None] * FIRST_CODE + ids["id"].to_list(), dtype=pl.String).gather(columns.pop(name))
        for name, ids in built.ids.items()
    }
    frame = pl.DataFrame({**texts, **columns})
    event_id = pl.Series([None] * len(frame), dtype=pl.String).scatter(
        np.flatnonzero(columns["supervise"]), pl.Series(events.to_pylist(), dtype=pl.String)
    )
    segments = pl.DataFrame(
        {
            "user_id": pl.Series(source.users.to_pylist(), dtype=pl.String),
            "length": source.lengths,
            "num_targets": built.ragged.targets[built.ragged.roles & role != 0].astype(np.int64),
        }
    )
    return Decoded(tokens=frame.with_columns(event_id.alias("event_id")), segments=segments)


def source_of(parts: Sequence[Sequences], words: Vocabulary, role: int = 1) -> RaggedSource:
    """Encode the sequences of buckets, as the stages do."""
    tables = [{name: rows_of(ids, words.tables[name]) for name, ids in part.ids.items()} for part in parts]
    return _source(parts, tables, role)


def _source(parts: Sequence[Sequences], tables: list[dict[str, Any]], role: int) -> RaggedSource:
    """Map sequences in the layout that they were built for."""
    ragged, places = [part.ragged for part in parts], [part.places for part in parts if part.places is not None]
    return InterleavedSource(ragged, places, tables, role) if places else RaggedSource(ragged, tables, role)


def count_ids(events: pl.DataFrame, features: Sequence[str], rules: Mapping[str, Any]) -> dict[str, pl.DataFrame]:
    """Count the ids of each table in events, each row once."""
    counts = {}
    for name in features:
        codes, ids = dictionary(events, name, rules[name].fallback_by if name in rules else None)
        found = np.bincount(codes, minlength=FIRST_CODE + len(ids))[FIRST_CODE:]
        counts[name] = merge_counts([ids.with_columns(count=pl.Series(found, dtype=pl.Int64))])
    return counts


def build(events: pl.DataFrame, **changes: Any) -> Decoded:
    """Build the sequences of events, their own column `due` telling the targets."""
    return decoded(build_sequences(events, {"train": events["due"]}, rules(**changes)))
