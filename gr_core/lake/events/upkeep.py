"""Upkeep of the event table after a night: small files become few, files that no night needs go.

Each ingestion writes a file or two a bucket. Once a run of `RUN` commits is complete and `LAG` more have come (the
newest rows are the ones that repeats still change), the run's small files of a bucket are written anew as one sorted
file, late rows apart: each row is written twice in all, and a table of many nights has about one file a run and
bucket. The Delta version that does it says that no data changed, is no ingestion, and adds no number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from gr_core.lake import store
from gr_core.lake.clusters import RECENT_US
from gr_core.lake.events import layout
from gr_core.lake.events.writing import Writing, clusters
from gr_core.refs import Ref

logger = logging.getLogger("gr_core.lake.events")

RUN = 16  # commits whose files become one
LAG = 4  # commits that wait beside a complete run
SMALL_ROWS = 2**18  # larger files stay as they are
MARK = "daybreak.compaction"
"""Metadata key of a version that compacted: the first and the last commit of the run."""
_FEW_FILES = 3  # of a run and bucket: what its compaction leaves at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Ref):
    """What one upkeep did."""

    runs: int = 0
    """Runs of commits whose files became few."""
    files: int = 0
    """Small files that they were."""
    written_bytes: int = 0
    deleted_files: int = 0
    """Files of old versions that were deleted."""


def compact(open_table: Callable[[], DeltaTable | None], uri: str, newest_commit: int) -> Kept:
    """Make few files of each complete run of commits; a race that is lost is left to the next night.

    Args:
        open_table: Opens the table at its newest version.
        uri: The table.
        newest_commit: The number of its newest commit.
    """
    done = Kept()
    table = open_table()
    for first in range(1, newest_commit - LAG - RUN + 2, RUN):
        if table is None:
            break
        small = _small_files(layout.files_of(table), first)
        if small.is_empty():
            continue
        writing = Writing(table, uri, layout.schema_of(table))
        last = first + RUN - 1
        try:
            for bucket in small["bucket"].unique().sort():
                _merge(layout.in_buckets(small, [bucket]), bucket, writing)
            writing.commit(CommitProperties(custom_metadata={MARK: f"{first}-{last}"}, max_commit_retries=0))
        except CommitFailedError:
            writing.discard()
            logger.info("compaction of commits %d to %d met another writer and is left to the next night", first, last)
            break
        except BaseException:
            writing.discard()
            raise
        logger.info("%d files of commits %d to %d were compacted", small.height, first, last)
        written = done.written_bytes + writing.bytes
        done = Kept(runs=done.runs + 1, files=done.files + small.height, written_bytes=written)
        table = open_table()
    return done


def _small_files(files: pl.DataFrame, first: int) -> pl.DataFrame:
    """Return the small files of single commits of a run, of buckets that have more of them than compaction leaves."""
    inside = (pl.col("min.commit") >= first) & (pl.col("min.commit") < first + RUN)
    single = pl.col("min.commit") == pl.col("max.commit")
    small = files.filter(inside & single & (pl.col("rows") < SMALL_ROWS))
    return small.filter(pl.len().over("bucket") > _FEW_FILES)


def _merge(files: pl.DataFrame, bucket: int, writing: Writing) -> None:
    """Write the rows of a bucket's small files as one file of the run's own days, and one of late rows."""
    parts = [layout.read_file(uri) for uri in files["uri"]]
    rows = pl.concat(parts, how="diagonal_relaxed").sort(layout.ORDER)
    newest = rows.group_by("commit").agg(pl.col("shown_at").max()).sort("commit")["shown_at"].to_physical()
    # the run's own days start with its first commit's newest ones
    for cluster in clusters(rows, int(newest.max()) - int(newest[0]) + RECENT_US):  # type: ignore[arg-type]
        writing.add(bucket, cluster, data_change=False)
    for file in files.iter_rows(named=True):
        writing.remove(file["path"], bucket, file["size"], data_change=False)


def vacuum(table: DeltaTable, uri: str, keep_versions: Iterable[int], retention_hours: int) -> int:
    """Delete files that the newest version and the kept ones do not have, and what killed writers left; returns how many.

    Args:
        table: Open at its newest version.
        uri: The table.
        keep_versions: Versions that nights may still read.
        retention_hours: Files that left the table, or came to its folder, within so many hours stay.
    """
    options = _vacuum_options(table, keep_versions, retention_hours)
    found = _stale(table, uri, options)
    if found:
        table.vacuum(dry_run=False, **options)
    return len(found)


def stale(table: DeltaTable, uri: str, keep_versions: Iterable[int], retention_hours: int) -> dict[str, int]:
    """Return the files that `vacuum` would delete, by name, with their bytes; takes its arguments."""
    return _stale(table, uri, _vacuum_options(table, keep_versions, retention_hours))


def _vacuum_options(table: DeltaTable, keep_versions: Iterable[int], retention_hours: int) -> dict[str, Any]:
    newest = int(table.version())
    return {
        "retention_hours": retention_hours,
        "enforce_retention_duration": False,
        "full": True,
        "keep_versions": sorted({version for version in keep_versions if 0 <= version < newest}),
    }


def _stale(table: DeltaTable, uri: str, options: dict[str, Any]) -> dict[str, int]:
    there = {one.name: one.size for one in store.listing(uri)}
    # the log tells of files that left the table long after they are deleted; without one to delete there is no version
    return {name: there[name] for name in table.vacuum(dry_run=True, **options) if name in there}
