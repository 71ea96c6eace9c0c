"""Side tables: joined to the contract rows at ingestion, as of the newest snapshot complete before each event.

In: contract rows with `shown_at`. Out: the same rows with the tables' side features as text, and for each table
whether the row found its key.
"""

from __future__ import annotations

from datetime import date

import polars as pl

from gr_core.config import Config, TableConfig
from gr_core.data import expressions
from gr_core.lake import rawfile, userkey
from gr_core.lake.source import SourceFile, list_snapshot, snapshot_of, snapshots

_SNAPSHOT, _FOUND = "\x00snapshot", "\x00found"


def not_found(table: TableConfig) -> str:
    """Name the column that says that an event has no row in a side table."""
    return f"\x00no:{table.name}"


def join_tables(config: Config, rows: pl.DataFrame, reason: str) -> pl.DataFrame:
    """Join every side table to contract rows, keeping their order and number.

    Args:
        config: The run's config.
        rows: Contract rows; a side feature that the feed itself gives is kept where it is not null.
        reason: Column with the reason why a row breaks the contract, null where none.

    Returns:
        The rows with side features filled and a boolean column `not_found(table)`: no row for this event. Where the
        table says `missing = "quarantine"` such rows have the reason `missing_<table>`.

    Raises:
        DataContractError: A table's file cannot be read, or lacks or mistypes a column.
    """
    key = userkey.load(config)
    for table in config.source.tables:
        if "{date}" in table.path:
            rows, chosen = _as_of(config, table, rows)
            parts = [
                _read(table, list_snapshot(config, table, snapshot), key).with_columns(
                    pl.lit(snapshot).alias(_SNAPSHOT)
                )
                for snapshot in chosen
            ]
            content = pl.concat([_read(table, [], key).with_columns(pl.lit(None, pl.Date).alias(_SNAPSHOT)), *parts])
            rows = _joined(rows, table, content, [_SNAPSHOT]).drop(_SNAPSHOT)
        else:
            rows = _joined(rows, table, _read(table, list_snapshot(config, table, None), key), [])
        missing = pl.col(not_found(table))
        if table.missing == "quarantine":
            broken = pl.when(pl.col(reason).is_null() & missing).then(pl.lit(f"missing_{table.name}"))
            rows = rows.with_columns(pl.coalesce(reason, broken).alias(reason))
    return rows


def _as_of(config: Config, table: TableConfig, rows: pl.DataFrame) -> tuple[pl.DataFrame, list[date]]:
    """Add the date of the snapshot that each row sees. Snapshots become complete at day starts, so its day decides."""
    rows = rows.with_columns(pl.col("shown_at").dt.convert_time_zone(config.lake.zone).dt.date().alias(_SNAPSHOT))
    days = rows[_SNAPSHOT].drop_nulls().unique().sort().to_list()
    dates = snapshots(config, table)
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
