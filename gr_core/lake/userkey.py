"""Pseudonymous users: with `source.pseudonymise_users` a user's id is a keyed hash from the contract on.

stored id = BLAKE2b(raw id as UTF-8 text, key = the key's bytes, digest_size = 16) in hex. The key comes from the
environment and is never stored; the lake keeps a check value of it, so that another key, or none, is refused before
it would make every user a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection
from typing import Any

import polars as pl

from gr_core import environment
from gr_core.config import Config
from gr_core.errors import ConfigError
from gr_core.formats import check_format
from gr_core.lake import store

FORMAT = 1
_MIN_BYTES, _MAX_BYTES = 16, 64  # BLAKE2b takes at most 64; below 16, all keys can be tried


def load(config: Config) -> bytes | None:
    """Return the key of a run; None where users are kept by their own ids.

    Raises:
        ConfigError: The environment variable is not set, or the key is too short or too long.
    """
    source = config.source
    if not source.pseudonymise_users:
        return None
    key = (environment.variable(source.user_key_variable) or "").encode()
    if _MIN_BYTES <= len(key) <= _MAX_BYTES:
        return key
    wrong = f"has {len(key)} bytes" if key else "is not set"
    raise ConfigError(
        f"source.pseudonymise_users needs a key of {_MIN_BYTES} to {_MAX_BYTES} bytes in the environment variable "
        f"{source.user_key_variable}, which {wrong}; set it to the lake's key (a new lake: any secret text of that "
        "length, kept where it is not lost)",
        where="source.user_key_variable",
    )


def stored_user(key: bytes | None, raw_id: str) -> str:
    """Return the id a user is stored under: the raw one without a key, else 32 hex digits."""
    return raw_id if key is None else hashlib.blake2b(raw_id.encode(), key=key, digest_size=16).hexdigest()


def stored_users(key: bytes, users: pl.Series) -> pl.Series:
    """Return the stored ids of a column of raw ids (text); nulls stay null. Each distinct id is hashed once."""
    distinct = users.drop_nulls().unique()
    stored = [stored_user(key, user) for user in distinct]
    return users.replace_strict(distinct, stored, default=None, return_dtype=pl.String)


def check(config: Config, home: str, *, started: bool) -> None:
    """Refuse a run whose users would be other ones than the lake's.

    Args:
        config: The run's config.
        home: URI of the home.
        started: Whether the lake holds events.

    Raises:
        ConfigError: No key or another one than the lake's, or the lake was made with the other setting.
    """
    key = load(config)
    if not started:
        return
    known = _known(home)
    where = "source.pseudonymise_users"
    if key is None and known is not None:
        raise ConfigError(f"{where}: the lake of {home} holds pseudonyms; set it to true", where=where)
    if key is not None and known is None:
        raise ConfigError(
            f"{where}: the lake of {home} holds users by their own ids; set it to false, or start another home with --home",
            where=where,
        )
    if key is not None and known is not None and not hmac.compare_digest(known, _check_value(key)):
        raise ConfigError(
            f"{config.source.user_key_variable} is not the key that the lake of {home} was made with, so every user "
            "would become another one; set the lake's key, or start another home with --home",
            where="source.user_key_variable",
        )


def remember(config: Config, home: str, *, started: bool) -> None:
    """Check as `check` does, and keep the key's check value before a lake's first event; nothing without a key."""
    check(config, home, started=started)
    key = load(config)
    if key is not None and not started:
        store.write_json(_uri(home), {"format": FORMAT, "check": _check_value(key)})


def redact(text: str, key: bytes, user_columns: Collection[str], kept: Collection[str]) -> str:
    """Return a raw row for quarantine without its user's id.

    Args:
        text: The row as JSON, or the text of a row that is none.
        key: The run's key.
        user_columns: Raw columns that the user's id is made of; their values are replaced by stored ids.
        kept: Raw columns that the contract reads; all others are dropped, since they may name the user too.
    """
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return json.dumps({"unreadable_characters": len(text)})
    shown = {
        name: stored_user(key, str(value)) if name in user_columns and value is not None else value
        for name, value in row.items()
        if name in kept
    }
    return json.dumps(shown)


def _uri(home: str) -> str:
    return store.join(home, "lake", "user_key.json")


def _known(home: str) -> str | None:
    try:
        told = store.read_json(_uri(home))
    except FileNotFoundError:
        return None
    check_format("user key", _uri(home), told.get("format"), FORMAT, "use the release that wrote it, or a new home")
    return str(told["check"])


def _check_value(key: bytes) -> str:
    """Return what the lake keeps of a key: no user's stored id, by its `person`."""
    return hashlib.blake2b(b"", key=key, digest_size=16, person=b"daybreak check").hexdigest()
