"""Versions of the event table that remove rows: how they are marked, and how a user leaves all of them.

Each is one Delta commit that is marked and counted (`MARK`), so that whatever is derived from the table notices. Files
are named one by one, so that no predicate in Delta's log names a user.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import polars as pl
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError

from gr_core.errors import CommitConflict
from gr_core.hashing import bucket_of
from gr_core.lake import store
from gr_core.lake.commits import INGEST
from gr_core.lake.events import books, layout
from gr_core.lake.events.writing import Writing

logger = logging.getLogger("gr_core.lake.events")

MARK = "daybreak.erasure"
"""Metadata key of a version that removed rows: how many such versions there are, this one included."""
TOLD = "daybreak.erased"
"""Metadata key beside it: what was removed, as JSON."""
COUNT = "erasure"
ERASED_AT = "erased-at"  # app transaction: the newest version that removed rows
FORGOTTEN_AT = "forgotten-at"  # the newest that removed a forgotten user's rows: older ones have lost files
_ATTEMPTS = 30

Open = Callable[[int | None], DeltaTable | None]


def marks(table: DeltaTable, what: dict[str, Any], *, change: int, forgets: bool) -> CommitProperties:
    """Return the commit properties of a version that removes rows: metadata, count, balance, and the version it will be.

    The version is certain, since the commit fails where another writer took that number.
    """
    number = (table.transaction_version(COUNT) or 0) + 1
    here = table.version() + 1
    transactions = [Transaction(COUNT, number), Transaction(ERASED_AT, here), books.entry(table, change)]
    if forgets:
        transactions.append(Transaction(FORGOTTEN_AT, here))
    return CommitProperties(
        custom_metadata={MARK: str(number), TOLD: json.dumps(what, sort_keys=True)},
        max_commit_retries=0,
        app_transactions=transactions,
    )


def readable(open_at: Open, version: int) -> tuple[DeltaTable | None, int | None]:
    """Open a pinned version, or what stands in for it once a forgotten user's files are gone.

    Files of versions before the newest forgetting may be deleted. Such a version is read as the one that forgot, of
    it the rows that were there: those up to the pinned version's newest commit (with labels learnt since).

    Returns:
        The table, and the newest commit to read; None: all.
    """
    newest = open_at(None)
    at = None if newest is None else newest.transaction_version(FORGOTTEN_AT)
    if at is None or at <= version:
        return open_at(version), None
    pinned = open_at(version)
    return open_at(at), None if pinned is None else pinned.transaction_version(INGEST) or 0


def user_rows(open_at: Open, user: str, num_buckets: int, version: int | None = None) -> pl.DataFrame:
    """Read commit and shown_at of all rows of a user in a version (None: the newest), forgotten or not."""
    table = open_at(version)
    own = [] if table is None else _may_hold(table, user, num_buckets)["uri"].to_list()
    parts = [layout.read_file(uri, pl.col("user_id") == user, ["commit", "shown_at"]) for uri in own]
    return pl.concat([pl.DataFrame(schema={"commit": pl.Int64(), "shown_at": layout.TIME}), *parts])


def _may_hold(table: DeltaTable, user: str, num_buckets: int) -> pl.DataFrame:
    files = layout.in_buckets(layout.files_of(table), [bucket_of(user, num_buckets)])
    return files.filter(layout.at_least("user_id", user) & layout.at_most("user_id", user))


def forget_rows(open_at: Open, uri: str, user: str, num_buckets: int) -> int:
    """Remove a user's rows: the files that hold him are written anew without them, as one Delta commit.

    Args:
        open_at: Opens the table at a version; None: the newest.
        uri: The table.
        user: The id as the table has it.
        num_buckets: Of the lake.

    Returns:
        Rows removed; 0 makes no version.

    Raises:
        CommitConflict: Other writers won every attempt.
    """
    bucket = bucket_of(user, num_buckets)
    for _ in range(_ATTEMPTS):
        table = open_at(None)
        if table is None:
            return 0
        writing, removed = Writing(table, uri, layout.schema_of(table)), 0
        for file in _may_hold(table, user, num_buckets).iter_rows(named=True):
            rows = layout.read_file(file["uri"])
            kept = rows.filter(pl.col("user_id") != user)
            if kept.height == rows.height:
                continue
            removed += rows.height - kept.height
            writing.remove(file["path"], bucket, file["size"])
            if kept.height:
                writing.add(bucket, kept)
        if not removed:
            return 0
        try:
            writing.commit(marks(table, {"kind": "forget", "rows": removed}, change=-removed, forgets=True))
        except CommitFailedError:
            writing.discard()
            continue
        logger.info("%d rows of a forgotten user left the event table", removed)
        return removed
    raise CommitConflict("other writers won every attempt to forget a user; run it again when they are done")


def forget_files(open_at: Open, uri: str, user: str, num_buckets: int) -> int:
    """Delete what old versions still hold of a user whose rows are gone: his files, and his id in Delta's log.

    Only files that hold him and that the newest version does not have are deleted; `readable` stands in for the
    versions that had them. The log keeps every version; what it says of values in deleted files is taken out.

    Returns:
        Files deleted.
    """
    table = open_at(None)
    if table is None:
        return 0
    bucket = bucket_of(user, num_buckets)
    live = {path.rsplit("/", 1)[-1] for path in layout.in_buckets(layout.files_of(table), [bucket])["path"]}
    deleted = 0
    for name in _names(store.join(uri, f"bucket={bucket}")):
        path = store.join(uri, f"bucket={bucket}", name)
        if name in live or not name.endswith(".parquet") or not _holds(path, user):
            continue
        store.remove(path)
        deleted += 1
    _scrub_log(table, uri, user, live)
    return deleted


def _names(uri: str) -> list[str]:
    """List the files of a folder, not of folders in it, by name."""
    return [found.name for found in store.listing(uri) if "/" not in found.name]


def _holds(path: str, user: str) -> bool:
    try:
        return not layout.read_file(path, pl.col("user_id") == user, ["user_id"]).is_empty()
    except (pl.exceptions.PolarsError, OSError):
        return True  # what a killed writer left is no file of the table


def _scrub_log(table: DeltaTable, uri: str, user: str, live: set[str]) -> None:
    """Take a user's id out of the statistics that the log keeps of deleted files; checkpoints are made anew."""
    log, spellings = store.join(uri, "_delta_log"), _spellings(user)
    names = _names(log)
    for name in names:
        if not name.endswith(".json") or name.startswith("_"):
            continue
        content = store.read_bytes(store.join(log, name))
        if not any(spelling in content for spelling in spellings):
            continue
        lines = [_scrubbed(line, user, live) for line in content.splitlines()]
        store.write_bytes(store.join(log, name), b"\n".join(lines) + b"\n")
    checkpoints = [name for name in names if ".checkpoint." in name]
    if checkpoints:
        table.create_checkpoint()
        kept = f"{table.version():020d}.checkpoint"
        for name in checkpoints:
            if not name.startswith(kept):
                store.remove(store.join(log, name))


def _spellings(user: str) -> set[bytes]:
    """Return how the log may spell an id: statistics are JSON text inside JSON text, and either may have escapes."""
    once = {json.dumps(user, ensure_ascii=escapes)[1:-1] for escapes in (False, True)}
    twice = {json.dumps(text, ensure_ascii=escapes)[1:-1] for text in once for escapes in (False, True)}
    return {text.encode() for text in once | twice}


def _scrubbed(line: bytes, user: str, live: set[str]) -> bytes:
    action = json.loads(line)
    add = action.get("add")
    if add is None or add["path"].rsplit("/", 1)[-1] in live or not add.get("stats"):
        return line
    stats = json.loads(add["stats"])
    values = [str(v) for part in ("minValues", "maxValues") for v in (stats.get(part) or {}).values()]
    if not any(user in value for value in values):
        return line
    action["add"] = {**add, "stats": json.dumps({"numRecords": stats.get("numRecords")})}
    return json.dumps(action, separators=(",", ":")).encode()
