"""Stable hashes and fingerprints: equal in every process, on every machine, in every release."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SPAN = 2.0**64


def stable_hash(identifier: str | int, what: str) -> int:
    """Hash an id to 64 bits, salted by its use.

    Two uses need two salts: one hash for both buckets and holdout would put the holdout users
    (hash % 50 = 0) into half of the buckets.

    Args:
        identifier: The id; integers hash as their decimal text, so 7 and "7" agree.
        what: The use, at most 16 bytes ("bucket", "holdout"); BLAKE2b's `person`.

    Returns:
        The first 8 bytes of BLAKE2b, little-endian, in [0, 2**64).
    """
    digest = hashlib.blake2b(str(identifier).encode(), digest_size=8, person=what.encode())
    return int.from_bytes(digest.digest(), "little")


def bucket_of(user_id: str | int, num_buckets: int) -> int:
    """Return the bucket (unit of data parallelism) of a user, in [0, num_buckets)."""
    return stable_hash(user_id, "bucket") % num_buckets


def buckets_of(user_ids: Iterable[str], num_buckets: int) -> list[int]:
    """Return the bucket of each of many distinct users, as `bucket_of` does."""
    new, number, what = hashlib.blake2b, int.from_bytes, b"bucket"
    return [
        number(new(user.encode(), digest_size=8, person=what).digest(), "little") % num_buckets for user in user_ids
    ]


def is_holdout(user_id: str | int, fraction: float) -> bool:
    """Tell whether a user is evaluated only, never trained on."""
    return stable_hash(user_id, "holdout") / _SPAN < fraction


def fingerprint(value: Any) -> str:
    """Return "sha256:..." of the canonical JSON of `value` (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def short(digest: str) -> str:
    """Return the first twelve hex digits of a "sha256:..." fingerprint, for names a person reads."""
    return digest.removeprefix("sha256:")[:12]


def file_sha256(path: Path) -> str:
    """Return the hex SHA-256 of a local file, read in chunks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
