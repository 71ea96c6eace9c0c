"""Rows that leave the event table: a forgotten user's for good, a retracted commit's into quarantine.

Each is one Delta commit that is marked and counted (`MARK`), so that whatever is derived from the table notices.
No predicate that Delta writes into its log names a user: whole buckets are overwritten, or rows named by a source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError

from gr_core.errors import CommitConflict
from gr_core.hashing import bucket_of
from gr_core.lake import store
from gr_core.lake.events import layout
from gr_core.refs import Ref

logger = logging.getLogger("gr_core.lake.events")

MARK = "daybreak.erasure"
"""Metadata key of a version that removed rows: how many such versions there are, this one included."""
TOLD = "daybreak.erased"
"""Metadata key beside it: what was removed, as JSON."""
COUNT = "erasure"
ERASED_AT = "erased-at"  # app transaction: the newest version that removed rows
FORGOTTEN_AT = "forgotten-at"  # the newest that removed a forgotten user's rows: older ones have lost files
_INGEST = "ingest"
_ATTEMPTS = 30
_WRITER = WriterProperties(compression="ZSTD", compression_level=3)
_ORDER = ("user_id", "shown_at", "event_id")
_KEYS = ("bucket", "commit", "event_id")

Open = Callable[[int | None], DeltaTable | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraction(Ref):
    """What taking back one commit did; kept in the metadata of the version that did it."""

    commit: int
    reason: str
    rows: int
    """Events of the commit that were removed."""
    restored: int
    """Events of earlier commits that have their content from before the commit again."""
    kept: int
    """Events of earlier commits that it had changed and that stay: changed again since, or too old to be restored."""
    earliest_us: int | None
    """Earliest shown_at among trained users' events removed or restored; None: no trained user had any."""
    quarantine: str
    """Path of the removed rows below the lake's quarantine; empty: no row."""


def marks(table: DeltaTable, what: dict[str, Any], *, forgets: bool) -> CommitProperties:
    """Return the commit properties of a version that removes rows: metadata, count, and the version it will be.

    The version is certain, since the commit fails where another writer took that number.
    """
    number = (table.transaction_version(COUNT) or 0) + 1
    here = table.version() + 1
    transactions = [Transaction(COUNT, number), Transaction(ERASED_AT, here)]
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
    return open_at(at), None if pinned is None else pinned.transaction_version(_INGEST) or 0


def user_rows(open_at: Open, user: str, num_buckets: int) -> pl.DataFrame:
    """Read commit and shown_at of all rows of a user in the newest version, forgotten or not."""
    table = open_at(None)
    return _own_rows(layout.FILES.to_frame() if table is None else layout.files_of(table), user, num_buckets)


def _own_rows(files: pl.DataFrame, user: str, num_buckets: int) -> pl.DataFrame:
    files = layout.in_buckets(files, [bucket_of(user, num_buckets)])
    files = files.filter(layout.at_least("user_id", user) & layout.at_most("user_id", user))
    if files.is_empty():
        return pl.DataFrame(schema={"commit": pl.Int64, "shown_at": layout.TIME})
    return _raw(files).filter(pl.col("user_id") == user).select("commit", "shown_at").collect()


def forget_rows(open_at: Open, user: str, num_buckets: int) -> int:
    """Remove a user's rows: his bucket is written anew without them, sorted, as one Delta commit.

    Args:
        open_at: Opens the table at a version; None: the newest.
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
        files = layout.in_buckets(layout.files_of(table), [bucket])
        rows = _own_rows(files, user, num_buckets).height
        if not rows:
            return 0
        kept = _raw(files).filter(pl.col("user_id") != user).collect().sort(_ORDER)
        properties = marks(table, {"kind": "forget", "rows": rows}, forgets=True)
        try:
            if kept.is_empty():
                table.delete(f"bucket = {bucket}", commit_properties=properties)
            else:
                write_deltalake(
                    table,
                    _arrow(kept.with_columns(pl.lit(bucket, pl.Int32).alias("bucket")), table),
                    mode="overwrite",
                    predicate=f"bucket = {bucket}",
                    writer_properties=_WRITER,
                    commit_properties=properties,
                )
        except CommitFailedError:
            continue
        logger.info("%d rows of a forgotten user left the event table", rows)
        return int(rows)
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
        found = pl.scan_parquet(path, hive_partitioning=False, glob=False).filter(pl.col("user_id") == user).head(1)
        return not found.collect().is_empty()
    except (pl.exceptions.PolarsError, OSError):
        return True  # what a killed writer left is no file of the table


def _scrub_log(table: DeltaTable, uri: str, user: str, live: set[str]) -> None:
    """Take a user's id out of the statistics that the log keeps of deleted files; checkpoints are made anew."""
    log, needle = store.join(uri, "_delta_log"), json.dumps(user)[1:-1].encode()
    names = _names(log)
    for name in names:
        if not name.endswith(".json") or name.startswith("_"):
            continue
        content = store.read_bytes(store.join(log, name))
        # statistics are JSON text inside JSON text
        if needle not in content and json.dumps(needle.decode())[1:-1].encode() not in content:
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


def retracted_rows(table: DeltaTable, commit: int) -> pl.DataFrame:
    """Read a commit's rows as the newest version has them, all columns, by user and time."""
    files = layout.files_of(table)
    may = layout.at_least("commit", commit) & layout.at_most("commit", commit)
    return _with_bucket(files.filter(may), pl.col("commit") == commit)


def changed_rows(table: DeltaTable, commit: int) -> pl.DataFrame:
    """Read the rows of earlier commits that a commit was the last to change."""
    files = layout.files_of(table)
    may = layout.at_least("updated", commit) & layout.at_most("updated", commit)
    return _with_bucket(files.filter(may), (pl.col("updated") == commit) & (pl.col("commit") < commit))


def earlier_content(table: DeltaTable | None, changed: pl.DataFrame) -> pl.DataFrame:
    """Read rows as an older version has them; those whose files are gone are left out.

    Args:
        table: Open at the older version; None where it cannot be opened.
        changed: The rows as they are now.
    """
    if table is None or changed.is_empty():
        return changed.clear()
    files, parts = layout.files_of(table), [changed.clear()]
    for (bucket,), own in changed.group_by("bucket", maintain_order=True):
        wanted = own.select("event_id", "commit")
        low, high = own["commit"].min(), own["commit"].max()
        assert isinstance(low, int)
        assert isinstance(high, int)
        there = files.filter(
            (pl.col("bucket") == bucket) & layout.at_least("commit", low) & layout.at_most("commit", high)
        )
        try:
            found = _raw(there).join(wanted.lazy(), on=["event_id", "commit"], how="semi").collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            logger.warning("what bucket %s was before cannot be read any more: %s", bucket, type(error).__name__)
            continue
        parts.append(found.with_columns(pl.lit(bucket, pl.Int32).alias("bucket")).select(_shared(found, changed)))
    return pl.concat(parts, how="diagonal")


def _shared(found: pl.DataFrame, like: pl.DataFrame) -> list[str]:
    return [name for name in like.columns if name in found.columns or name == "bucket"]


def changed_again(then: DeltaTable | None, now: DeltaTable, commit: int) -> int:
    """Count the rows that a commit had changed, as the version that it made tells, and a later commit changed since.

    Args:
        then: Open at the version that the commit made; None: that cannot be told any more, so 0.
        now: Open at the newest version.
        commit: The commit.
    """
    try:
        was = changed_rows(then, commit) if then is not None else None
    except (pl.exceptions.PolarsError, OSError):
        was = None
    if was is None or was.is_empty():
        return 0
    files = layout.in_buckets(layout.files_of(now), was["bucket"].unique())
    later = _with_bucket(files.filter(layout.at_least("updated", commit + 1)), pl.col("updated") > commit)
    return was.join(later, on=list(_KEYS), how="semi").height if later.height else 0


def take_back(table: DeltaTable, gone: pl.DataFrame, restored: pl.DataFrame, told: Retraction) -> bool:
    """Remove a commit's rows and restore what it changed, as one Delta commit.

    Returns:
        False where another writer was faster and nothing was written: read again, then try again.
    """
    try:
        _take_back(table, gone, restored, told)
    except CommitFailedError:
        return False
    return True


def _take_back(table: DeltaTable, gone: pl.DataFrame, restored: pl.DataFrame, told: Retraction) -> None:
    properties = marks(table, {"kind": "retract", **told.to_json()}, forgets=False)
    if restored.is_empty():
        # without a merge nothing is held in memory, and a file of only this commit just goes
        table.delete(f"commit = {told.commit}", writer_properties=_WRITER, commit_properties=properties)
        return
    source = pl.concat(
        [
            gone.select(_KEYS).with_columns(pl.lit(value=True).alias("gone")),
            restored.with_columns(pl.lit(value=False).alias("gone")),
        ],
        how="diagonal",
    )
    schema = pa.schema(
        [field.with_nullable(True) for field in pa.schema(table.schema().to_arrow()) if field.name in restored.columns]
        + [pa.field("gone", pa.bool_())]
    )
    places = [f"t.{name} IN ({', '.join(map(str, source[name].unique().sort()))})" for name in ("bucket", "commit")]
    merger = table.merge(
        pa.table([source[field.name].to_arrow().cast(field.type) for field in schema], schema=schema),
        " AND ".join(places + [f"t.{name} = s.{name}" for name in _KEYS]),
        source_alias="s",
        target_alias="t",
        writer_properties=_WRITER,
        commit_properties=properties,
    )
    values = {f"`{name}`": f"s.`{name}`" for name in schema.names if name not in (*_KEYS, "gone")}
    merger.when_matched_delete("s.gone").when_matched_update(values, predicate="NOT s.gone").execute()


def retractions(table: DeltaTable) -> list[Retraction]:
    """Return what was retracted so far, oldest first; walks the log, for an operator's command."""
    told = [json.loads(entry[TOLD]) for entry in table.history() if TOLD in entry]
    return [Retraction.from_json(value) for value in reversed(told) if value.get("kind") == "retract"]


def _with_bucket(files: pl.DataFrame, wanted: pl.Expr) -> pl.DataFrame:
    """Read the wanted rows of chosen files with every column that they have."""
    parts = [
        _raw(own).filter(wanted).collect().with_columns(pl.lit(bucket, pl.Int32).alias("bucket"))
        for (bucket,), own in files.group_by("bucket", maintain_order=True)
    ]
    if not parts:  # no file may hold any
        return pl.DataFrame(
            schema={
                "bucket": pl.Int32,
                "commit": pl.Int64,
                "event_id": pl.String,
                "user_id": pl.String,
                "shown_at": layout.TIME,
            }
        )
    return pl.concat([part for part in parts if part.height] or parts[:1], how="diagonal").sort("bucket", *_ORDER)


def _raw(files: pl.DataFrame) -> pl.LazyFrame:
    """Scan files of one bucket as they are: every column any of them has, forgotten users too, without the bucket."""
    parts = [pl.scan_parquet(uri, hive_partitioning=False, glob=False) for uri in files["uri"].to_list()]
    return pl.concat(parts, how="diagonal")


def _arrow(frame: pl.DataFrame, table: DeltaTable) -> pa.Table:
    schema = pa.schema(table.schema().to_arrow())
    columns = [
        frame[field.name].to_arrow().cast(field.type)
        if field.name in frame.columns
        else pa.nulls(frame.height, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
