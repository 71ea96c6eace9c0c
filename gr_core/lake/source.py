"""Raw files of a day: listing by feed, their identity, and the check before any state changes.

In: the config and a day. Out: `SourceFile` values; DataContractError names what a delivery lacks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import logging
import re
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import polars as pl

from gr_core.config import Config, FeedConfig, TableConfig
from gr_core.data import expressions
from gr_core.data.users import refuse_clear_ids
from gr_core.errors import DataContractError
from gr_core.lake import rawfile, store

logger = logging.getLogger(__name__)

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_IGNORE = ("_*", ".*")  # side tables: the feeds' default


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One raw file as it was listed."""

    feed: str
    """The feed's name, or `table:<name>` for a side table."""
    uri: str
    size: int
    """Bytes."""
    etag: str
    """Tells versions apart: mtime in nanoseconds locally, the store's ETag (or its last change) elsewhere."""


def list_files(config: Config, day: date, feed: FeedConfig) -> list[SourceFile]:
    """List a feed's data files of a day, by name; an empty list where there are none.

    Names that match `ignore`, directories and directory markers are no data.

    Raises:
        DataContractError: A data file has no bytes (an upload that broke off).
        StoreUnavailable: The object store did not answer.
    """
    return _listed(config, feed.path.replace("{date}", day.isoformat()), feed.name, feed.ignore)


def list_table(config: Config, day: date, table: TableConfig) -> list[SourceFile]:
    """List a side table's files that hold for a lake day.

    Without {date} in the path the table is the same for every day. With it, the newest snapshot that is complete
    when the day begins: snapshot S counts from S + snapshot_lag_days on. An empty list where there is none.

    Raises:
        DataContractError: A file has no bytes.
        StoreUnavailable: The object store did not answer.
    """
    if "{date}" not in table.path:
        return list_snapshot(config, table, None)
    snapshot = snapshot_of(day, snapshots(config, table), table)
    return [] if snapshot is None else list_snapshot(config, table, snapshot)


def list_snapshot(config: Config, table: TableConfig, snapshot: date | None) -> list[SourceFile]:
    """List the files of one snapshot of a side table; None for a table without {date}. Raises as `list_table`."""
    path = table.path if snapshot is None else table.path.replace("{date}", snapshot.isoformat())
    return _listed(config, path, f"table:{table.name}", _IGNORE)


def snapshot_of(day: date, dates: list[date], table: TableConfig) -> date | None:
    """Return the newest of a table's snapshots (ascending) that is complete when a lake day begins; None: none yet."""
    newest = day - timedelta(days=table.snapshot_lag_days)
    return max((found for found in dates if found <= newest), default=None)


def snapshots(config: Config, table: TableConfig) -> list[date]:
    """List the dates for which a {date} table has files, ascending."""
    pattern = re.escape(table.path).replace(re.escape("{date}"), rf"({_DATE.pattern})")
    pattern = pattern.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    found = set()
    for file in _listed(config, table.path.replace("{date}", "*"), f"table:{table.name}", _IGNORE):
        match = re.search(pattern + "$", file.uri)
        if match:
            found.add(date.fromisoformat(match.group(1)))
    return sorted(found)


def input_identity(files: list[SourceFile]) -> list[list[str | int]]:
    """Return what a fingerprint compares: feed, URI, size and etag of each file, in an order of their own."""
    return sorted([f.feed, f.uri, f.size, f.etag] for f in files)


def preflight(config: Config, day: date, *, bootstrap: bool) -> list[SourceFile]:
    """Check a day's raw files before any state changes: there, readable, with usable columns.

    Args:
        config: The run's config.
        day: The data day D.
        bootstrap: True for a night that also reads the bootstrap feeds.

    Returns:
        All files the day will read: events feed, bootstrap feeds where asked for, side tables. Without files of the
        events feed where the day is missing and `source.missing_day` is "warn".

    Raises:
        ConfigError: Wrong SQL, or a setting this release does not read.
        DataContractError: Missing day, unreadable file, missing or mistyped column.
    """
    source = config.source
    refuse_clear_ids(config)
    files: list[SourceFile] = []
    for feed in source.feeds:
        if feed.role == "bootstrap" and not bootstrap:
            continue
        found = list_files(config, day, feed)
        if not found:
            missing(config, day, feed)
        _check_feed(config, feed, found)
        files += found
    for table in source.tables:
        found = table_files(config, day, table)
        for file in found:
            schema = rawfile.read_schema(file.uri, table.format, table.types, f"source.tables[{table.name}]")
            for value in expressions.table_values(table):
                expressions.check_value(value, schema, file.uri, table)
        files += found
    return files


def table_files(config: Config, day: date, table: TableConfig) -> list[SourceFile]:
    """List a side table's files as `list_table` does; DataContractError where it has none for any day."""
    found = list_table(config, day, table)
    if not found and ("{date}" not in table.path or not snapshots(config, table)):
        raise DataContractError(
            f"side table {table.name}: no file matches {store.join(config.source.root, table.path)}{_rootless(config)}; "
            f"deliver it or remove the table from source.tables",
            where=table.path,
        )
    return found


def feed_schemas(feed: FeedConfig, files: list[SourceFile]) -> list[dict[str, pl.DataType]]:
    """Return the columns of each file as they will be read.

    A column of the feed's declared `types` may be absent from some of a day's files: it is null there (case C2).
    One that no file has stays missing.
    """
    return completed(feed, own_schemas(feed, files))


def own_schemas(feed: FeedConfig, files: list[SourceFile]) -> list[dict[str, pl.DataType]]:
    """Return the columns that each file has (or its path), as they will be read."""
    key = f"source.feeds[{feed.name}]"
    return [rawfile.read_schema(file.uri, feed.format, feed.types, key) for file in files]


def completed(feed: FeedConfig, schemas: list[dict[str, pl.DataType]]) -> list[dict[str, pl.DataType]]:
    """Return the files' columns and the declared ones that only others of them have, as `feed_schemas` does."""
    seen = {name for schema in schemas for name in schema}
    optional = {name: expressions.DECLARED[kind] for name, kind in feed.types.items() if name in seen}
    return [{**optional, **schema} for schema in schemas]


def _check_feed(config: Config, feed: FeedConfig, files: list[SourceFile]) -> None:
    check = expressions.FeedCheck(config.source, feed)
    for file, schema in zip(files, feed_schemas(feed, files), strict=True):
        check(schema, file.uri)


def missing(config: Config, day: date, feed: FeedConfig) -> None:
    """Raise DataContractError for a feed without files, or warn where `missing_day` says so."""
    pattern = store.join(config.source.root, feed.path.replace("{date}", day.isoformat()))
    rootless = _rootless(config)
    if feed.role == "bootstrap":
        raise DataContractError(
            f"feed {feed.name}: no file matches {pattern}{rootless}; deliver the history or remove the bootstrap feed",
            where=pattern,
        )
    if config.source.missing_day == "stop":
        raise DataContractError(
            f"day {day} is missing: no file of feed {feed.name} matches {pattern}{rootless}; deliver it, or set "
            'source.missing_day = "warn" to go on with what is due',
            where=pattern,
        )
    logger.warning("day %s is missing: no file of feed %s matches %s%s", day, feed.name, pattern, rootless)


def _rootless(config: Config) -> str:
    """Return that a local source root is not there, to follow what was not found below it; "" where it is."""
    root = config.source.root
    if not store.is_local(root) or store.local_path(root).exists():
        return ""
    return f", source.root {root} does not exist (seen from {Path.cwd()})"


def _listed(config: Config, pattern: str, feed: str, ignore: tuple[str, ...]) -> list[SourceFile]:
    root = config.source.root
    fixed = next((n for n, part in enumerate(pattern.split("/")) if glob.has_magic(part)), pattern.count("/"))
    files = []
    for path, uri, size, etag in _local(root, pattern) if store.is_local(root) else _remote(root, pattern):
        names = path.split("/")[fixed:]
        if any(fnmatch.fnmatchcase(name, junk) for name in names for junk in ignore):
            continue
        if size == 0:
            raise DataContractError(
                f"{uri}: the file has no bytes, so its upload broke off; deliver it again or remove it", where=uri
            )
        files.append(SourceFile(feed, uri, size, etag))
    return sorted(files, key=lambda file: file.uri)


def _local(root: str, pattern: str) -> list[tuple[str, str, int, str]]:
    base = store.local_path(root)
    found = []
    try:
        for path in base.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # removed since it was seen
                if path.is_file():
                    stat = path.stat()
                    found.append((path.relative_to(base).as_posix(), str(path), stat.st_size, str(stat.st_mtime_ns)))
    except (OSError, ValueError) as error:  # no right to look, a name too long, a byte that no name has
        raise DataContractError(
            f"{store.join(root, pattern)}: cannot be listed: {error}; mend the path or its rights", where=pattern
        ) from error
    return found


def _remote(root: str, pattern: str) -> list[tuple[str, str, int, str]]:
    return [(one.name, one.uri, one.size, one.etag) for one in store.matching(root, pattern)]
