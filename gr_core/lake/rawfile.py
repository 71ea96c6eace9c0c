"""One raw file: its schema, its rows as typed columns, and single rows as JSON for quarantine.

Parquet brings its types; csv and ndjson (each also gzip-compressed) are read as text and cast to the declared
types, so that one bad value costs one row and never the file, and nothing is inferred from the first rows. The
key=value folders of a path are columns too, where the file has none of that name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import polars as pl

from gr_core.data.expressions import DECLARED, normal
from gr_core.errors import ConfigError, DataContractError
from gr_core.lake import jsonlines, partitions, store

Format = Literal["parquet", "csv", "ndjson"]

PROBLEM = "\x00problem"  # per row: null, bad_row (no readable record) or bad_value (a value not of its declared type)

_HEAD_BYTES = (2**20, 2**24)  # of a text file's head at least and at most, _LINE_BYTES a row between
_LINE_BYTES = 1024
_COUNTED_ROWS = 4096  # whose bytes tell how many rows the rest of a text file has

# PanicException: Polars' Rust side gives up on some damaged files that way
_DAMAGED = (pl.exceptions.PolarsError, pl.exceptions.PanicException, EOFError, zlib.error, UnicodeError, csv.Error)


def read_schema(uri: str, form: Format, types: Mapping[str, str], key: str) -> dict[str, pl.DataType]:
    """Return the columns of a raw file as they will be read, cheaply (footer, header or first rows).

    Args:
        uri: The file.
        form: Its format.
        types: Declared raw types; a declared column that a parquet file lacks is not in the answer.
        key: Dotted config key of the owner, for messages.

    Raises:
        DataContractError: The file cannot be read, or a column (or a key of its path) is not of its declared type.
        ConfigError: A declared type is not known.
    """
    declared = _declared(types, key)
    path = {name: dtype for name, (dtype, _) in partitions.typed(uri, declared, key).items()}
    try:
        if form == "parquet":
            found = {name: normal(dtype) for name, dtype in _footer(uri).items()}
        elif form == "csv":
            found = dict.fromkeys(_text_frame(uri, form, [], head=1).drop(PROBLEM).columns, pl.String())
        else:
            _text_frame(uri, form, list(declared), head=100)
            found = {}
    except (*_DAMAGED, OSError) as error:
        raise _unreadable(uri, form, error) from None
    if form == "ndjson":
        return {**path, **declared}
    if form == "csv":
        return {**path, **{name: declared.get(name, dtype) for name, dtype in found.items()}}
    for name, dtype in declared.items():
        if name in found and found[name] not in (dtype, pl.Null()):
            raise DataContractError(
                f"{uri}: column {name} has type {found[name]}, {key}.types declares {types[name]}; "
                "mend the file or the declaration",
                where=uri,
            )
    return {**path, **found}


def read_frame(
    uri: str,
    form: Format,
    types: Mapping[str, str],
    columns: Sequence[str],
    schema: Mapping[str, pl.DataType],
    head: int | None = None,
    part: tuple[int, int] | None = None,
) -> pl.DataFrame:
    """Read the rows of a raw file, in file order.

    Args:
        uri: The file.
        form: Its format.
        types: Declared raw types.
        columns: Columns to read; all stand in `schema`.
        schema: What `read_schema` gave.
        head: At most so many rows, and of a text file at most those within its first 16 MiB; None: all.
        part: First row and number of rows of a slice; parquet only, whose other row groups are not read.

    Returns:
        The columns in the types of `schema`, and PROBLEM (text).

    Raises:
        DataContractError: The file cannot be read.
    """
    path = partitions.typed(uri, schema, "")
    try:
        own = _own_columns(uri, form, columns, path)
        if form == "parquet":
            start, rows = part or (0, head)
            scan = pl.scan_parquet(_open(uri), hive_partitioning=False, glob=False, use_statistics=False)
            frame = scan.slice(start, rows).select(own).collect()
            casts = [pl.col(name).cast(schema[name]) for name in own if frame.schema[name] != schema[name]]
            given = [pl.lit(path[name][1], schema[name]).alias(name) for name in columns if name not in own]
            return frame.with_columns(*casts, *given, pl.lit(None, pl.String).alias(PROBLEM)).select(*columns, PROBLEM)
        exact = [name for name in own if schema[name] in (pl.String, pl.Int64)]
        frame = _text_frame(uri, form, own, head, exact)
    except (*_DAMAGED, OSError) as error:
        raise _unreadable(uri, form, error) from None
    typed = [_from_text(name, schema[name]).alias(name) for name in own if schema[name] != pl.String]
    bad = [_from_text(n, schema[n]).is_null() & pl.col(n).is_not_null() for n in own if schema[n] != pl.String]
    wrong = pl.when(pl.any_horizontal(bad)).then(pl.lit("bad_value")) if bad else pl.lit(None, pl.String)
    frame = frame.with_columns(*typed, pl.coalesce(PROBLEM, wrong).alias(PROBLEM))
    lit = {name: pl.lit(path[name][1], schema[name]) for name in columns if name in path}
    given = [(pl.coalesce(name, value) if name in own else value).alias(name) for name, value in lit.items()]
    return frame.with_columns(given if form == "ndjson" else [e for e in given if e.meta.output_name() not in own])


def column_names(uri: str, form: Format, head: int | None = None) -> list[str]:
    """Return the names of all columns that a raw file holds, its path's keys apart.

    Args:
        uri: The file.
        form: Its format.
        head: Of ndjson the keys of its first records only; None: those of any record.

    Raises:
        DataContractError: The file cannot be read.
    """
    try:
        if form == "parquet":
            return list(_footer(uri))
        if form == "csv":
            return [name for name in _text_frame(uri, form, [], head=1).columns if name != PROBLEM]
        return jsonlines.keys(_lines(uri, head))
    except (*_DAMAGED, OSError) as error:
        raise _unreadable(uri, form, error) from None


def count_rows(uri: str, form: Format, size: int) -> tuple[int, bool]:
    """Count a raw file's rows cheaply: parquet from its footer, text files from their head.

    Args:
        uri: The file.
        form: Its format.
        size: Bytes of the file.

    Returns:
        The number, and whether it is exact: of a long text file it is projected from the head.

    Raises:
        DataContractError: The file cannot be read.
    """
    try:
        if form == "parquet":
            rows = pl.scan_parquet(_open(uri), hive_partitioning=False, glob=False).select(pl.len()).collect().item()
            return int(rows), True
        text, taken = _beginning(uri, _COUNTED_ROWS)
        lines = sum(1 for line in text.split(b"\n") if line.strip()) - (form == "csv")
        return (max(lines, 0), True) if taken is None else (round(max(lines, 0) * max(size / taken, 1.0)), False)
    except (*_DAMAGED, OSError) as error:
        raise _unreadable(uri, form, error) from None


def raw_rows(uri: str, form: Format, rows: Sequence[int], head: int | None = None) -> list[str]:
    """Return single rows, by place in the file, as JSON text: all the file's columns; unreadable lines as they are.

    With `head`, as in `read_frame`, no more of the file is read than that.

    Raises:
        DataContractError: The file is gone, or no longer the one whose rows were told.
    """
    try:
        return _raw_rows(uri, form, rows, head) if rows else []
    except (*_DAMAGED, OSError, IndexError) as error:
        raise DataContractError(
            f"{uri}: the file changed while it was read ({type(error).__name__}); run it again once it is delivered",
            where=uri,
        ) from None


def numbered(rows: pl.DataFrame) -> pl.DataFrame:
    """Return raw rows with numbers for times and dates: far beyond the calendar these cannot be written as text."""
    return rows.cast({name: _number(dtype) for name, dtype in rows.schema.items() if dtype != _number(dtype)})


def _number(dtype: pl.DataType) -> pl.DataType:
    if isinstance(dtype, pl.List):
        return pl.List(_number(dtype.inner))  # type: ignore[arg-type]
    if isinstance(dtype, pl.Array):
        return pl.Array(_number(dtype.inner), dtype.size)  # type: ignore[arg-type]
    if isinstance(dtype, pl.Struct):
        return pl.Struct({field.name: _number(field.dtype) for field in dtype.fields})  # type: ignore[arg-type]
    return pl.Int64() if dtype.is_temporal() else dtype


def _raw_rows(uri: str, form: Format, rows: Sequence[int], head: int | None) -> list[str]:
    if form == "ndjson":
        lines = _lines(uri, head)
        return [_shown(lines[row]) for row in rows]
    unread: dict[int, str] = {}
    first = 0 if form == "csv" else min(rows)
    if form == "csv":
        frame, unread = _csv_frame(uri, head)
    else:  # the row groups between the outermost rows, and no more
        scan = pl.scan_parquet(_open(uri), hive_partitioning=False, glob=False)
        frame = scan.slice(first, max(rows) - first + 1).collect()
    frame = frame[[row - first for row in rows]]
    try:
        records = frame.rows(named=True)
    except (ValueError, OverflowError, pl.exceptions.PanicException):
        records = numbered(frame).rows(named=True)
    found = zip(rows, records, strict=True)
    return [unread.get(place) or json.dumps(_plain(row), default=_readable) for place, row in found]


def _declared(types: Mapping[str, str], key: str) -> dict[str, pl.DataType]:
    for name, kind in types.items():
        if kind not in DECLARED:
            raise ConfigError(
                f"{key}.types.{name} must be one of {sorted(DECLARED)}, got {kind!r}", where=f"{key}.types.{name}"
            )
    return {name: DECLARED[kind] for name, kind in types.items()}


def _open(uri: str) -> Path | io.BytesIO:
    return store.local_path(uri) if store.is_local(uri) else io.BytesIO(store.read_bytes(uri))


def _footer(uri: str) -> pl.Schema:
    # not read_parquet_schema: it takes [ ] * in a name for a glob
    return pl.scan_parquet(_open(uri), hive_partitioning=False, glob=False).collect_schema()


def _own_columns(uri: str, form: Format, columns: Sequence[str], path: Mapping[str, object]) -> list[str]:
    """Return the columns that the file itself gives: all but those that only its path has."""
    if not any(name in path for name in columns):
        return list(columns)
    if form == "ndjson":  # a record may have what its path has, too
        return list(columns)
    there = column_names(uri, form)
    return [name for name in columns if name in there or name not in path]


def _content(uri: str, head: int | None = None) -> bytes:
    if head is not None:
        return _beginning(uri, head)[0]
    content = store.read_bytes(uri)
    return gzip.decompress(content) if uri.endswith(".gz") else content


def _beginning(uri: str, rows: int) -> tuple[bytes, int | None]:
    """Return the whole records at a text file's head, and the bytes of the file that they took (None: all)."""
    limit = min(max(rows * _LINE_BYTES, _HEAD_BYTES[0]), _HEAD_BYTES[1])
    stream: BinaryIO
    if store.is_local(uri):
        stream = store.local_path(uri).open("rb")
    else:  # twice the limit: a packed file is hardly longer than what it holds
        stream = io.BytesIO(store.read_range(uri, 0, 2 * limit))
    with stream:
        source = gzip.GzipFile(fileobj=stream) if uri.endswith(".gz") else stream
        text = source.read(limit + 1)
        if len(text) <= limit:
            return text, None
        taken = stream.tell()
    end = text.rfind(b"\n", 0, limit)
    while end > 0 and text.count(b'"', 0, end) % 2:  # a line that ends inside quotes is not the record's last
        end = text.rfind(b"\n", 0, end)
    return text[: end + 1], taken


def _lines(uri: str, head: int | None = None) -> list[str]:
    # bytes that are no UTF-8 become lone surrogates, which cost their line and no other
    text = _content(uri, head).decode("utf-8", "surrogateescape").removeprefix("\ufeff")  # a byte order mark
    return [line for line in text.split("\n") if line.strip()][:head]


def _shown(text: str) -> str:
    """Return text of a file with its bytes that are no UTF-8 written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text_frame(
    uri: str, form: Format, columns: list[str], head: int | None = None, exact: Sequence[str] = ()
) -> pl.DataFrame:
    """Read csv (all columns where none are named) or ndjson as text columns and PROBLEM.

    A record of ndjson whose number in an `exact` column may have been another integer has the PROBLEM bad_value.
    """
    if form == "csv":
        frame, unread = _csv_frame(uri, head)
        twice = [name for name in columns if f"{name}_duplicated_0" in frame.columns]  # as Polars calls the second
        if twice:
            raise DataContractError(
                f"{uri}: the header has {twice[0]} twice, and which is meant cannot be told; mend the file", where=uri
            )
        places = pl.int_range(frame.height, eager=True)
        told = pl.when(places.is_in(list(unread))).then(pl.lit("bad_row")).alias(PROBLEM)
        return frame.select(columns or pl.all()).with_columns(told)
    lines = _lines(uri, head)
    record = pl.Struct(dict.fromkeys(columns, pl.String()))
    problem = pl.Series(PROBLEM, [None] * len(lines), dtype=pl.String)
    try:
        series = pl.Series("line", lines, dtype=pl.String)
        values = series.str.json_decode(record) if columns else series
    except (pl.exceptions.ComputeError, UnicodeEncodeError):
        # one line that is no JSON object fails them all: find such lines, and keep the rest
        good = [jsonlines.is_object(line) for line in lines]
        if columns:
            tried = jsonlines.decodable([line if ok else "{}" for line, ok in zip(lines, good, strict=True)], record)
            good = [ok and decodes for ok, decodes in zip(good, tried, strict=True)]
        if head is not None and not any(good):
            raise
        problem = pl.Series(PROBLEM, [None if ok else "bad_row" for ok in good], dtype=pl.String)
        kept = [line if ok else "{}" for line, ok in zip(lines, good, strict=True)]
        series = pl.Series("line", kept, dtype=pl.String)
        values = series.str.json_decode(record) if columns else series
    frame = values.struct.unnest() if columns else pl.DataFrame()
    rounded = jsonlines.rounded(series, exact)
    if rounded:
        told = pl.when(pl.int_range(len(lines)).is_in(rounded)).then(pl.lit("bad_value"))
        return frame.with_columns(problem).with_columns(pl.coalesce(PROBLEM, told).alias(PROBLEM))
    return frame.with_columns(problem)


def _csv_frame(uri: str, head: int | None = None) -> tuple[pl.DataFrame, dict[int, str]]:
    """Read all columns of a csv as text. Records that are none by the header are null rows; their text, by place."""
    content = _content(uri, head)
    try:
        return pl.read_csv(io.BytesIO(content), infer_schema=False, n_rows=head), {}
    except pl.exceptions.ComputeError:
        # one record with too many fields or broken bytes fails them all: blank such records, and keep the rest
        mended, unread, count = _mended(content)
        frame = pl.read_csv(io.BytesIO(mended), infer_schema=False, n_rows=head)
        if not unread or (head is None and frame.height != count):
            raise
        return frame, unread


def _mended(content: bytes) -> tuple[bytes, dict[int, str], int]:
    """Blank the records of a csv that have too many fields or bytes that are no UTF-8; count all records."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    if not lines[-1]:
        lines.pop()
    reader = csv.reader(line + "\n" for line in lines)
    width, end = len(next(reader, [])), reader.line_num
    kept, unread, count = lines[:end], dict[int, str](), 0
    for record in reader:
        text = "\n".join(lines[end : reader.line_num])
        if len(record) > width or not jsonlines.is_utf8(text):
            unread[count] = _shown(text)
            text = "," * (width - 1)
        kept.append(text)
        count, end = count + 1, reader.line_num
    return "\n".join([*kept, ""]).encode("utf-8", "surrogateescape"), unread, count


def _from_text(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if dtype == pl.Boolean:
        truth = {"true": True, "1": True, "false": False, "0": False}
        return column.str.to_lowercase().replace_strict(truth, default=None, return_dtype=pl.Boolean)
    return column.cast(dtype, strict=False)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _readable(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _unreadable(uri: str, form: Format, error: BaseException) -> DataContractError:
    # the reader quotes what it could not read, which may name a user
    text = re.split('[`"]', str(error).strip().split("\n", 1)[0])[0].strip(" :")
    named = {"csv": "csv", "tsv": "csv", "json": "ndjson", "jsonl": "ndjson", "ndjson": "ndjson", "parquet": "parquet"}
    looks = named.get(uri.lower().removesuffix(".gz").rsplit(".", 1)[-1], form)
    remedy = (
        "deliver the file again" if looks == form else f'its name says {looks}: set format = "{looks}" of this feed'
    )
    return DataContractError(f"{uri}: cannot be read as {form}: {text or type(error).__name__}; {remedy}", where=uri)
