"""Which files of an event table version may hold the rows that are asked for, and reads of only those.

In: an open table. Out: its files with their statistics as a small frame, and the rows of a choice of them.
Files hold one bucket each, sorted by (user_id, shown_at, event_id) in small row groups, so the statistics of files
rule out times and commits, those of row groups users.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from gr_core.config import Config
from gr_core.data.batch import polars_schema
from gr_core.lake import deltalog, store

WHAT = "event table"
UNTOUCHED = "the journal, checkpoints and models are untouched"
TIME = pl.Datetime("us", "UTC")
URI = "\x00uri"  # column that tells a row's file
KEY = ("event_id", "commit")  # tells a row of the table
ORDER = ("user_id", "shown_at", "event_id")  # of the rows of a file
FILES = pl.Schema(
    {
        "path": pl.String(),
        "uri": pl.String(),
        "bucket": pl.Int32(),
        "size": pl.Int64(),
        "rows": pl.Int64(),
        "min.user_id": pl.String(),
        "max.user_id": pl.String(),
        "min.shown_at": TIME,
        "max.shown_at": TIME,
        "min.commit": pl.Int64(),
        "max.commit": pl.Int64(),
        "min.updated": pl.Int64(),
        "max.updated": pl.Int64(),
    }
)
"""A version's files: path below the table, URI, bucket, bytes, rows, and what their columns lie between (null: unknown)."""


def files_of(table: DeltaTable) -> pl.DataFrame:
    """Return the files of the version that a table is open at, as `FILES`, by path; reads the log alone."""
    told = pl.from_arrow(table.get_add_actions(flatten=True))
    names = {"size_bytes": "size", "num_records": "rows", "partition.bucket": "bucket"}
    if told.is_empty():
        return FILES.to_frame()
    found = (told if isinstance(told, pl.DataFrame) else told.struct.unnest()).rename(names, strict=False)
    root = store.delta_file(table.table_uri).rstrip("/")
    found = found.with_columns((pl.lit(root + "/") + pl.col("path")).alias("uri"))
    return found.select(
        (pl.col(name) if name in found.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in FILES.items()
    ).sort("path")


def schema_of(table: DeltaTable) -> pa.Schema:
    """Return all columns that a table has."""
    return pa.schema(table.schema().to_arrow())


def in_buckets(files: pl.DataFrame, buckets: Iterable[int] | None) -> pl.DataFrame:
    """Keep the files of some buckets; None keeps all."""
    return files if buckets is None else files.filter(pl.col("bucket").is_in(list(buckets)))


def at_least(column: str, value: int | str | pl.Expr) -> pl.Expr:
    """Return whether a file may hold a row whose column is this value or greater."""
    highest = pl.col(f"max.{column}")
    return highest.is_null() | (highest >= value)


def at_most(column: str, value: int | str | pl.Expr) -> pl.Expr:
    """Return whether a file may hold a row whose column is this value or less."""
    lowest = pl.col(f"min.{column}")
    return lowest.is_null() | (lowest <= value)


def scan(files: pl.DataFrame, config: Config, *, uris: bool = False) -> pl.LazyFrame:
    """Scan chosen files as the config's columns; one that a file does not have is null. With `uris` URI tells the file."""
    schema = polars_schema(config)
    written = pl.Schema({name: dtype for name, dtype in schema.items() if name != "bucket"})
    parts = [
        pl.scan_parquet(
            own,
            schema=written,
            missing_columns="insert",
            extra_columns="ignore",
            hive_partitioning=False,
            glob=False,
            storage_options=store.scan_options(own[0]),
            include_file_paths=URI if uris else None,
        ).with_columns(pl.lit(bucket, pl.Int32).alias("bucket"))
        for bucket, own in files.group_by("bucket").agg("uri").sort("bucket").iter_rows()
    ]
    names = [*schema.names(), URI] if uris else schema.names()
    if not parts:
        return pl.Schema({**schema, URI: pl.String()}).to_frame().select(names).lazy()
    return (pl.concat(parts) if len(parts) > 1 else parts[0]).select(names)


def collect(rows: pl.LazyFrame, files: pl.DataFrame, *, streaming: bool = False) -> pl.DataFrame:
    """Read what a scan of files wants of them.

    Raises:
        FormatError: One of the files is damaged or gone; it is named.
        Whatever else Polars met, as it is.
    """
    try:
        return rows.collect(engine="streaming" if streaming else "auto")
    except (pl.exceptions.PolarsError, OSError) as error:
        _refuse_damaged(files["uri"].to_list(), error)
        raise


def _refuse_damaged(uris: Iterable[str], error: Exception) -> None:
    """Name the first file that is not there, or no whole Parquet file; an object store's trouble passes as it is."""
    for uri in uris:
        if store.named(uri, error) is not None:
            return
        try:
            pl.read_parquet_schema(uri if store.is_local(uri) else io.BytesIO(store.read_bytes(uri)))
        except (pl.exceptions.PolarsError, OSError) as found:
            raise deltalog.damaged_data(uri, WHAT, found, untouched=UNTOUCHED) from error


def read_file(uri: str, wanted: pl.Expr | None = None, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read one data file as it is: with the columns that it has, whatever the config.

    Args:
        uri: The file.
        wanted: Which of its rows; None: all.
        columns: Only these columns; None: all.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: Credentials, rights or the bucket of an object store.
        StoreUnavailable: The object store did not answer.
    """
    with store.answering(uri):
        rows = pl.scan_parquet(uri, hive_partitioning=False, glob=False, storage_options=store.scan_options(uri))
        rows = rows if wanted is None else rows.filter(wanted)
        return (rows if columns is None else rows.select(columns)).collect()
