"""Tombstones: users who asked to be forgotten, as hashes, so that the list itself holds nobody.

One small file a user below the lake, named by the user's bucket and hash: writing one is atomic and needs no other
file, and a listing tells all. They are honoured by every read of the event table and at ingestion, so what a
backup, a backfill or a re-delivered file brings back stays out. The hash has no key (a key beside it would guard
nothing): who can guess an id can tell whether it is listed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from gr_core.errors import DamagedFile
from gr_core.formats import check_format
from gr_core.hashing import bucket_of
from gr_core.lake import store

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "tombstones"
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.json")


def digest(user: str) -> str:
    """Return the hash a user is listed by: 32 hex digits of BLAKE2b-128 over the id as the event table has it."""
    return hashlib.blake2b(str(user).encode(), digest_size=16, person=b"forgotten").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstones:
    """The users that are forgotten; an empty one hides nobody and costs nothing."""

    by_bucket: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_bucket)

    @property
    def buckets(self) -> frozenset[int]:
        """Buckets that have a forgotten user; a read of other buckets need not ask."""
        return frozenset(self.by_bucket)

    def hides(self, users: pl.Series) -> pl.Series:
        """Tell which rows are a forgotten user's.

        Args:
            users: User ids as text, any order, null where unknown.

        Returns:
            One boolean a row, never null. Only distinct users are hashed, about a microsecond each.
        """
        if not self:
            return pl.repeat(value=False, n=len(users), eager=True, dtype=pl.Boolean)
        listed = frozenset[str]().union(*self.by_bucket.values())
        hidden = [user for user in users.drop_nulls().unique() if digest(user) in listed]
        return users.is_in(pl.Series(hidden, dtype=pl.String).implode()).fill_null(value=False)


NOBODY = Tombstones()


def load(lake: str) -> Tombstones:
    """Read the tombstones of a lake: one listing, no file is opened."""
    found: dict[int, set[str]] = {}
    for one in store.listing(store.join(lake, FOLDER)):
        match = _NAME.fullmatch(one.name)
        if match:
            found.setdefault(int(match.group(1)), set()).add(match.group(2))
    return Tombstones(by_bucket={bucket: frozenset(digests) for bucket, digests in found.items()})


def trained(lake: str) -> list[list[int]]:
    """Return, of each forgotten user, the model versions that were trained on the user's events; opens every file."""
    files = store.listing(store.join(lake, FOLDER))
    return [list(_read(one.uri)["versions"]) for one in files if _NAME.fullmatch(one.name)]


def add(lake: str, user: str, num_buckets: int, *, at_us: int, versions: list[int]) -> dict[str, Any]:
    """List a user as forgotten; whole or not at all, and for good.

    Args:
        lake: URI of the lake.
        user: The id as the event table has it.
        num_buckets: Of the lake.
        at_us: When it was asked, microseconds since the epoch.
        versions: Model versions trained on the user's events; a repeat adds to those listed before.

    Returns:
        The tombstone as it stands now.
    """
    name = f"{bucket_of(user, num_buckets):05d}-{digest(user)}.json"
    uri = store.join(lake, FOLDER, name)
    try:
        before = _read(uri)
    except DamagedFile as error:
        logger.warning("%s; it is written anew, with what is known now of versions trained on the user", error)
        before = {"format": FORMAT, "at_us": at_us, "versions": []}
    except FileNotFoundError:
        before = {"format": FORMAT, "at_us": at_us, "versions": []}
    value = {**before, "versions": sorted({*before["versions"], *versions})}
    store.write_json(uri, value)
    return value


def _read(uri: str) -> dict[str, Any]:
    told: dict[str, Any] = store.read_json(uri)
    check_format("tombstone", uri, told.get("format"), FORMAT, "use the release that wrote it")
    return told
