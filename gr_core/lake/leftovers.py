"""What the lake holds of a forgotten user beside the event table: quarantined rows, and actions that wait.

Quarantined rows are raw rows as JSON text, so whose they are is found as the contract finds it: by the feed's SQL for
the user's id, over the row's own columns.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from gr_core.config import Config, FeedConfig
from gr_core.data import expressions
from gr_core.lake import store

PENDING = "pending"
QUARANTINE = "quarantine"


def clean(config: Config, lake: str, user: str) -> int:
    """Rewrite the quarantine and pending files of a lake without a user's rows; each whole or not at all.

    Args:
        config: The run's config; its feeds say which raw columns the user's id is made of.
        lake: URI of the lake.
        user: The id as the event table has it.

    Returns:
        Rows removed.
    """
    removed = 0
    for folder, find in ((QUARANTINE, quarantined), (PENDING, waiting)):
        for one in store.listing(store.join(lake, folder)):
            if not one.name.endswith(".parquet"):
                continue
            rows = pl.read_parquet(io.BytesIO(store.read_bytes(one.uri)))
            own = find(config, rows, user)
            if not own.any():
                continue
            content = io.BytesIO()
            rows.filter(~own).write_parquet(content, compression="zstd")
            store.write_bytes(one.uri, content.getvalue())
            removed += int(own.sum())
    return removed


def retracted(config: Config, root: str, user: str) -> set[int]:
    """Return the commits that were retracted with rows of a user, as the lake's quarantine has them.

    Args:
        config: The run's config.
        root: URI of the quarantine.
        user: The id as the event table has it.
    """
    found: set[int] = set()
    for one in store.listing(root):
        if not one.name.endswith(".parquet"):
            continue
        rows = pl.read_parquet(io.BytesIO(store.read_bytes(one.uri))).filter(pl.col("reason") == "retracted")
        own = rows.filter(quarantined(config, rows, user))["row"].to_list()
        found |= {int(row["commit"]) for row in map(_parse, own) if row is not None and "commit" in row}
    return found


def quarantined(config: Config, rows: pl.DataFrame, user: str) -> pl.Series:
    """Tell which quarantined rows (`quarantine.SCHEMA`) are a user's: one boolean a row."""
    feeds = {feed.name: feed for feed in config.source.feeds}
    own = [False] * rows.height
    for (name,), part in rows.with_row_index("place").group_by("feed", maintain_order=True):
        feed = feeds.get(str(name))
        found = _his(config, feed, part["row"].to_list(), user)
        for place, his in zip(part["place"].to_list(), found, strict=True):
            own[place] = his
    return pl.Series(own, dtype=pl.Boolean)


def waiting(config: Config, rows: pl.DataFrame, user: str) -> pl.Series:
    """Tell which waiting action rows are a user's, as far as their key names one: one boolean a row."""
    feed = config.source.feed("events")
    key = list(feed.event_key or ()) if feed is not None else []
    users = expressions.user_columns(config.source, feed) if feed is not None else set()
    places = [place for place, column in enumerate(key) if column in users]
    if not places or rows.is_empty():
        return pl.repeat(value=False, n=rows.height, eager=True, dtype=pl.Boolean)

    def names(event_id: str) -> bool:
        parts = event_id.split(":")
        # a part that has a colon itself shifts the others: then any part counts
        chosen = [parts[place] for place in places] if len(parts) == len(key) else parts
        return user in chosen or (len(parts) != len(key) and user in event_id)

    return pl.Series([names(event_id) for event_id in rows["event_id"].to_list()], dtype=pl.Boolean)


def _his(config: Config, feed: FeedConfig | None, texts: Sequence[str], user: str) -> list[bool]:
    columns = sorted(expressions.user_columns(config.source, feed)) if feed is not None else []
    parsed = [_parse(text) for text in texts]
    # action rows without an event to join stand as the contract has them: their key may name the user
    keys = [str((row or {}).get("event_id") or "") for row in parsed]
    keyed = waiting(config, pl.DataFrame({"event_id": keys}), user)
    worked_out = _ids(config, feed, parsed, columns)
    return [
        (row is None and _names(text, user))
        or (row is not None and (_same(row.get("user_id"), user) or any(_same(row.get(c), user) for c in columns)))
        or worked_out[place] == user
        or keyed[place]
        for place, (text, row) in enumerate(zip(texts, parsed, strict=True))
    ]


def _parse(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _names(text: str, user: str) -> bool:
    """Tell whether the text of a row that could not be read has a user's id as a word of its own."""
    return re.search(rf"(?<![0-9A-Za-z]){re.escape(user)}(?![0-9A-Za-z])", text) is not None


def _same(value: Any, user: str) -> bool:
    """Tell whether a raw value is a user's id, also where types differ: 7, 7.0, "7" and "007"."""
    if value is None or isinstance(value, bool | dict | list):
        return False
    if str(value) == user:
        return True
    if not re.fullmatch(r"-?[0-9]+", user):
        return False
    try:
        # exactly: as floats two ids above 2**53 would be one
        return int(user) == (int(value) if re.fullmatch(r"-?[0-9]+", str(value)) else float(value))
    except (ValueError, OverflowError):
        return False


def _ids(
    config: Config, feed: FeedConfig | None, rows: Sequence[dict[str, Any] | None], columns: Sequence[str]
) -> list[str | None]:
    """Work out the user ids of raw rows by the feed's SQL; null where that cannot be done."""
    nothing: list[str | None] = [None] * len(rows)
    if feed is None or not columns or "user_id" not in feed.columns:
        return nothing
    wanted = next(value for value in expressions.feed_values(config.source, feed) if value.name == "user_id")
    try:
        raw = pl.DataFrame(
            {column: [None if row is None else row.get(column) for row in rows] for column in columns}, strict=False
        )
        found = raw.select(expressions.text(wanted).alias("user_id"))["user_id"]
    except pl.exceptions.PolarsError:
        return nothing
    return found.to_list() if len(found) == len(rows) else nothing
