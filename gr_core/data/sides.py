"""Side tables: joined to the contract rows at ingestion, as of the newest snapshot complete before each event.

In: contract rows with `shown_at`. Out: the same rows with the tables' side features as text, and for each table
whether the row found its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date

import polars as pl

from gr_core.config import Config, TableConfig
from gr_core.data import expressions
from gr_core.data.rawrows import applied
from gr_core.lake import rawfile, userkey
from gr_core.lake.source import SourceFile, list_snapshot, snapshot_of, snapshots

_SNAPSHOT, _FOUND = "\x00snapshot", "\x00found"


@dataclass(frozen=True, slots=True)
class SideCache:
    """What one ingestion read of its side tables, so that its files and slices do not read it again."""

    snapshots: dict[tuple[str, date | None], pl.DataFrame] = field(default_factory=dict)
    dates: dict[str, list[date]] = field(default_factory=dict)


def not_found(table: TableConfig) -> str:
    """Name the column that says that an event has no row in a side table."""
    return f"\x00no:{table.name}"


def join_tables(config: Config, rows: pl.DataFrame, reason: str, cache: SideCache | None = None) -> pl.DataFrame:
    """Join every side table to contract rows, keeping their order and number.

    Args:
        config: The run's config.
        rows: Contract rows; a side feature that the feed itself gives is kept where it is not null.
        reason: Column with the reason why a row breaks the contract, null where none.
        cache: Snapshots that earlier calls of one ingestion read; those of this call are added.

    Returns:
        The rows with side features filled and a boolean column `not_found(table)`: no row for this event. Where the
        table says `missing = "quarantine"` such rows have the reason `missing_<table>`.

    Raises:
        DataContractError: A table's file cannot be read, or lacks or mistypes a column.
    """
    key = userkey.load(config)
    cache = SideCache() if cache is None else cache
    for table in config.source.tables:
        if "{date}" in table.path:
            rows, chosen = _as_of(config, table, rows, cache)
            parts = [
                _content(config, table, snapshot, key, cache).with_columns(pl.lit(snapshot).alias(_SNAPSHOT))
                for snapshot in chosen
            ]
            content = pl.concat([_read(table, [], key).with_columns(pl.lit(None, pl.Date).alias(_SNAPSHOT)), *parts])
            rows = _joined(rows, table, content, [_SNAPSHOT]).drop(_SNAPSHOT)
        else:
            rows = _joined(rows, table, _content(config, table, None, key, cache), [])
        missing = pl.col(not_found(table))
        if table.missing == "quarantine":
            broken = pl.when(pl.col(reason).is_null() & missing).then(pl.lit(f"missing_{table.name}"))
            rows = rows.with_columns(pl.coalesce(reason, broken).alias(reason))
    return rows


def _content(
    config: Config, table: TableConfig, snapshot: date | None, key: bytes | None, cache: SideCache
) -> pl.DataFrame:
    name = (table.name, snapshot)
    if name not in cache.snapshots:
        cache.snapshots[name] = _read(table, list_snapshot(config, table, snapshot), key)
    return cache.snapshots[name]


def _as_of(config: Config, table: TableConfig, rows: pl.DataFrame, cache: SideCache) -> tuple[pl.DataFrame, list[date]]:
    """Add the date of the snapshot that each row sees. Snapshots become complete at day starts, so its day decides."""
    rows = rows.with_columns(pl.col("shown_at").dt.convert_time_zone(config.lake.zone).dt.date().alias(_SNAPSHOT))
    days = rows[_SNAPSHOT].drop_nulls().unique().sort().to_list()
    if table.name not in cache.dates:
        cache.dates[table.name] = snapshots(config, table)
    dates = cache.dates[table.name]
    seen = [snapshot_of(day, dates, table) for day in days]
    mapping = pl.DataFrame({_SNAPSHOT: days, "seen": seen}, schema={_SNAPSHOT: pl.Date, "seen": pl.Date})
    rows = rows.join(mapping, on=_SNAPSHOT, how="left", maintain_order="left").drop(_SNAPSHOT)
    return rows.rename({"seen": _SNAPSHOT}), sorted({found for found in seen if found is not None})


def _read(table: TableConfig, files: list[SourceFile], key: bytes | None) -> pl.DataFrame:
    """Read a snapshot as text columns, one row a key: of rows that share one, the least by content.

    With a key, users are the pseudonyms that the contract gives them.
    """
    values = expressions.table_values(table)
    names = [value.name for value in values]
    parts = [pl.DataFrame(schema=dict.fromkeys(names, pl.String()))]
    for file in files:
        schema = rawfile.read_schema(file.uri, table.format, table.types, f"source.tables[{table.name}]")
        for value in values:
            expressions.check_value(value, schema, file.uri, table)
        raw = rawfile.read_frame(file.uri, table.format, table.types, expressions.raw_columns(values), schema)
        with applied(values, raw):
            part = raw.with_columns(expressions.text(value) for value in values).select(names)
        if key is not None and "on:user_id" in names:
            part = part.with_columns(userkey.stored_users(key, part["on:user_id"]).alias("on:user_id"))
        parts.append(part)
    keys = [name for name in names if name.startswith("on:")]
    return pl.concat(parts).drop_nulls(keys).sort(names).unique(keys, keep="first", maintain_order=True)


def _joined(rows: pl.DataFrame, table: TableConfig, content: pl.DataFrame, extra: list[str]) -> pl.DataFrame:
    joined = rows.join(
        content.with_columns(pl.lit(value=True).alias(_FOUND)),
        left_on=[*table.on, *extra],
        right_on=[*(f"on:{name}" for name in table.on), *extra],
        how="left",
        maintain_order="left",
    )
    return joined.with_columns(
        pl.col(_FOUND).is_null().alias(not_found(table)),
        *(pl.coalesce(name, f"side:{name}").alias(name) for name in table.side),
    ).drop(_FOUND, *(f"side:{name}" for name in table.side))
