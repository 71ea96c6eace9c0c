"""Users of a pseudonymised source: raw ids become stored ids at the contract, before anything is kept or logged.

In: a feed's rows with their raw ids. Out: the same rows under `lake.userkey`'s keyed hashes, also where the id is a part of
the event's id or stands in a raw row for quarantine. Without `source.pseudonymise_users` nothing changes.
"""

from __future__ import annotations

import polars as pl

from gr_core.config import Config, FeedConfig
from gr_core.data import expressions
from gr_core.errors import ConfigError
from gr_core.lake import rawfile, userkey


def stored_user(config: Config, raw_id: str) -> str:
    """Return the id that a user's events are stored under: a keyed hash where the source is pseudonymised.

    Args:
        config: The run's config.
        raw_id: The id as the feed has it, as text (integers in decimal).

    Raises:
        ConfigError: The source is pseudonymised, and its key is not in the environment.
    """
    return userkey.stored_user(userkey.load(config), raw_id)


def raw_rows(config: Config, feed: FeedConfig, uri: str, rows: list[int]) -> list[str]:
    """Return single raw rows as text for quarantine; of a pseudonymised source without the user's own id."""
    texts, key = rawfile.raw_rows(uri, feed.format, rows), userkey.load(config)
    if key is None:
        return texts
    users, kept = expressions.user_columns(config.source, feed), expressions.feed_columns(config.source, feed)
    return [userkey.redact(text, key, users, kept) for text in texts]


def pseudonymised(config: Config, feed: FeedConfig, frame: pl.DataFrame) -> pl.DataFrame:
    """Replace what a feed's rows say of their user by stored ids: `user_id`, and his columns' part of `event_id`.

    Args:
        config: The run's config; nothing changes unless its source is pseudonymised.
        feed: The feed, of any role.
        frame: The feed's raw columns, `event_id` and, if the feed gives it, `user_id` (text).
    """
    key = userkey.load(config)
    if key is None:
        return frame
    if "user_id" in feed.columns:
        frame = frame.with_columns(userkey.stored_users(key, frame["user_id"]).alias("user_id"))
    users = expressions.user_columns(config.source, feed)
    parts = [value for value in expressions.feed_values(config.source, feed) if value.name.startswith("id:")]
    if users.isdisjoint(root for part in parts for root in part.roots):
        return frame
    texts = frame.select(expressions.text(part) for part in parts)
    own = [userkey.stored_users(key, texts[p.name]).alias(p.name) for p in parts if not users.isdisjoint(p.roots)]
    event_id = texts.with_columns(own).select(pl.concat_str(pl.all(), separator=":").alias("event_id"))
    return frame.with_columns(event_id["event_id"])


def refuse_clear_ids(config: Config) -> None:
    """Refuse a pseudonymised source that would keep a user's own id in another column.

    Raises:
        ConfigError: An item, a request or a side feature is made of the columns that a user's id is made of.
    """
    source = config.source
    if not source.pseudonymise_users:
        return
    wanted = [
        (value, expressions.user_columns(source, feed))
        for feed in source.feeds
        for value in expressions.feed_values(source, feed)
        if value.name.startswith("side:") or value.name in ("item_id", "request_id")
    ]
    for table in source.tables:
        values = expressions.table_values(table)
        users = {root for value in values if value.name == "on:user_id" for root in value.roots}
        wanted += [(value, users) for value in values if value.name.startswith("side:")]
    for value, users in wanted:
        shown = sorted(users & set(value.roots))
        if shown:
            raise ConfigError(
                f"{value.key} = {value.sql!r} would keep {', '.join(shown)}, which source.pseudonymise_users hides; "
                "leave it out, or derive it from another column",
                where=value.key,
            )
