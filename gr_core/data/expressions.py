"""The declared side of a feed: SQL and time declarations turned into checked Polars expressions.

In: a feed's or table's config and the schema of one raw file. Out: expressions over that file's columns, or
the error that says which file, column or dotted key is wrong. Nothing here reads a file.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import polars as pl

from gr_core.config import FeedConfig, SourceConfig, TableConfig, TimeColumn
from gr_core.errors import ConfigError, DataContractError
from gr_core.lake import partitions

Kind = Literal["id", "text", "flag", "number"]
Schema = Mapping[str, pl.DataType]

INSTANT = pl.Datetime("us", "UTC")
DECLARED: dict[str, pl.DataType] = {
    "string": pl.String(),
    "int32": pl.Int64(),
    "int64": pl.Int64(),
    "float64": pl.Float64(),
    "bool": pl.Boolean(),
}
PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EARLIEST_SECOND = 946_684_800  # 2000-01-01; epoch seconds read as ms land in 1970 (case C12)
_LATEST_SECOND = 9_223_372_035  # 2262-04-11, the last second that int64 nanoseconds can hold
_EXPECTED = {
    "id": "an integer or text",
    "text": "a number, text or boolean",
    "flag": "a boolean (write a comparison such as is_click = 1)",
    "number": "a number of seconds",
}
_TYPES: dict[Kind, str] = {"flag": "bool", "number": "float64"}  # what a text column would be declared for them
# Polars' own test for this (meta.is_row_separable) needs the schema, and calls a RANK() OVER row-wise
_OTHER_ROWS = re.compile(
    r"\b(over|select|avg|corr|count|covar\w*|first|last|max|median|min|quantile\w*|std\w*|sum|var|var_pop|var_samp|variance|\w+_agg)\s*\(",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One contract value: SQL over raw columns, with the dotted config key it stands under."""

    name: str
    key: str
    sql: str
    expr: pl.Expr
    kind: Kind

    @property
    def roots(self) -> list[str]:
        """Raw columns that the expression reads."""
        return list(dict.fromkeys(self.expr.meta.root_names()))


def parse_sql(text: str, key: str) -> pl.Expr:
    """Parse one SQL expression that works row by row.

    Raises:
        ConfigError: It does not parse, gives several columns, or looks at other rows (an aggregate, a window, a
            subquery: its value would depend on how the day is cut into files).
    """
    try:
        expr = pl.sql_expr(text)
        plain = not expr.meta.has_multiple_outputs() and "subplan" not in str(expr)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(
            f"{key}: {text!r} is not valid SQL: {_first_line(error)}; mend it (a column whose name is no plain word stands "
            "in double quotes, such as '\"User ID\"')",
            where=key,
        ) from error
    if not plain or _OTHER_ROWS.search(_QUOTED.sub("''", text)):
        raise ConfigError(
            f"{key}: {text!r} must give one value from one row; leave out aggregates, windows and subqueries", where=key
        )
    return expr


def feed_values(source: SourceConfig, feed: FeedConfig) -> list[Wanted]:
    """Return what a feed's config derives from a row, the times apart.

    Names: user_id, item_id, request_id; `id:<n>` the parts of the event id (of an actions feed: of the event that the
    row is about); `action:<name>`; `side:<name>`; `delay` (seconds) where the visibility delay is SQL.
    """
    where = f"source.feeds[{feed.name}]"
    wanted = [_wanted(name, f"{where}.columns.{name}", sql, "id") for name, sql in feed.columns.items()]
    keys = [(feed.event_id, "event_id")] if feed.event_id else [(c, "event_key") for c in feed.event_key]
    keys += [(column, "on") for column in feed.on]
    wanted += [
        Wanted(f"id:{place}", f"{where}.{key}", str(column), pl.col(str(column)), "id")
        for place, (column, key) in enumerate(keys)
    ]
    wanted += [_wanted(f"action:{n}", f"{where}.actions.{n}", sql, "flag") for n, sql in feed.actions.items()]
    wanted += [_wanted(f"side:{n}", f"{where}.side.{n}", sql, "text") for n, sql in feed.side.items()]
    delay = delay_of(source, feed)
    if isinstance(delay, str) and feed.role != "actions":
        owner = where if feed.visibility_delay_seconds is not None else "source"
        wanted.append(_wanted("delay", f"{owner}.visibility_delay_seconds", delay, "number"))
    return wanted


def feed_times(feed: FeedConfig) -> dict[str, tuple[str, TimeColumn]]:
    """Return a feed's declared times: `shown_at`, `acted_at`, actions that have one, each with its dotted key."""
    where = f"source.feeds[{feed.name}]"
    times = {f"time:{n}": (f"{where}.action_times.{n}", time) for n, time in feed.action_times.items()}
    if feed.shown_at is not None:
        times["shown_at"] = (f"{where}.shown_at", feed.shown_at)
    if feed.acted_at is not None:
        times["acted_at"] = (f"{where}.acted_at", feed.acted_at)
    return times


def table_values(table: TableConfig) -> list[Wanted]:
    """Return a side table's values: `on:<contract column>` the keys, `side:<name>` the features."""
    where = f"source.tables[{table.name}]"
    keys = [Wanted(f"on:{n}", f"{where}.on.{n}", raw, pl.col(raw), "id") for n, raw in table.on.items()]
    return keys + [_wanted(f"side:{n}", f"{where}.side.{n}", sql, "text") for n, sql in table.side.items()]


def delay_of(source: SourceConfig, feed: FeedConfig) -> float | str:
    """Return the visibility delay that holds for a feed: seconds, or SQL that gives them."""
    own = feed.visibility_delay_seconds
    return source.visibility_delay_seconds if own is None else own


def user_columns(source: SourceConfig, feed: FeedConfig) -> set[str]:
    """Return the raw columns of a feed that its users' ids are made of; of an actions feed those of its key."""
    own = {value.name: value for value in feed_values(source, feed)}
    if "user_id" in own:
        return set(own["user_id"].roots)
    events = source.feed("events")
    if feed.role != "actions" or events is None:
        return set()
    users, key = user_columns(source, events), events.event_key or (events.event_id,)
    return {column for column, part in zip(feed.on, key, strict=False) if part in users}


def feed_columns(source: SourceConfig, feed: FeedConfig) -> list[str]:
    """Return the raw columns that a feed's config reads, each once, in a fixed order."""
    times = [time.column for _, time in feed_times(feed).values()]
    return list(dict.fromkeys([*raw_columns(feed_values(source, feed)), *times]))


def raw_columns(wanted: Iterable[Wanted]) -> list[str]:
    """Return the raw columns that some values read, each once, in a fixed order."""
    return list(dict.fromkeys(root for value in wanted for root in value.roots))


def normal(dtype: pl.DataType) -> pl.DataType:
    """Return the type a raw column is read as: widest integer and float, text for categories (cases C14, D3)."""
    if dtype.is_integer() and dtype not in (pl.UInt64, pl.Int128, pl.UInt128):
        return pl.Int64()
    if dtype.is_float():
        return pl.Float64()
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return pl.String()
    return dtype


def check_value(wanted: Wanted, schema: Schema, file: str, owner: FeedConfig | TableConfig) -> None:
    """Check that a value's SQL resolves against one raw file and has a usable type.

    Raises:
        DataContractError: A column is missing (names file, column, the columns there are) or mistyped (names file,
            column, type, expected type).
    """
    for column in wanted.roots:
        _present(column, wanted.key, schema, file, owner)
    texts = [column for column in wanted.roots if schema[column] == pl.String]
    types = ", ".join(f"{column} {schema[column]}" for column in wanted.roots)
    try:
        empty = pl.DataFrame(schema=dict(schema))
        dtype = empty.with_columns(wanted.expr.alias(wanted.name)).schema[wanted.name]
    except pl.exceptions.PolarsError as error:
        raise DataContractError(
            f"{file}: {wanted.key} = {wanted.sql!r} cannot be applied to {types}: {_first_line(error)}; "
            f"mend the file or the expression{_declare(owner, texts, 'int64')}",
            where=file,
        ) from error
    if not _usable(wanted.kind, dtype):
        raise DataContractError(
            f"{file}: {wanted.key} = {wanted.sql!r} has type {dtype} (columns: {types}), "
            f"expected {_EXPECTED[wanted.kind]}; mend the file or the expression"
            f"{_declare(owner, texts, _TYPES.get(wanted.kind, 'int64'))}",
            where=file,
        )


def check_time(time: TimeColumn, key: str, schema: Schema, file: str, owner: FeedConfig) -> None:
    """Check that a declared time's column exists and has the declared kind; raises as `check_value` does."""
    _present(time.column, key, schema, file, owner)
    dtype = schema[time.column]
    if dtype == pl.Null or dtype.is_(pl.Date) or isinstance(dtype, pl.Datetime):
        return
    if time.format is not None:
        _check_format(time.format, f"{key}.format")
        usable, expected = dtype == pl.String, f"text in the format {time.format}"
    elif time.unit is not None:
        usable, expected = dtype.is_integer(), f"an integer (unit {time.unit}) or a timestamp"
    else:
        usable, expected = False, "a timestamp; for integers declare unit, for text declare format"
    if not usable:
        texts = [time.column] if time.unit is not None and dtype == pl.String else []
        raise DataContractError(
            f"{file}: column {time.column} of {key} has type {dtype}, expected {expected}; "
            f"mend the file or the declaration{_declare(owner, texts, 'int64')}",
            where=file,
        )


class FeedCheck:
    """Checks all that a feed's config derives against its files' columns; files of equal columns once.

    Args:
        source: The source.
        feed: The feed.

    Raises:
        ConfigError: An expression is wrong.
    """

    def __init__(self, source: SourceConfig, feed: FeedConfig) -> None:
        self._feed, self._values, self._times = feed, feed_values(source, feed), feed_times(feed)
        self._good: set[frozenset[tuple[str, pl.DataType]]] = set()

    def __call__(self, schema: Schema, file: str) -> None:
        """Raise as `check_time` and `check_value` do for a file's columns."""
        columns = frozenset(schema.items())
        if columns in self._good:
            return
        for key, time in self._times.values():
            check_time(time, key, schema, file, self._feed)
        for value in self._values:
            check_value(value, schema, file, self._feed)
        self._good.add(columns)


def text(wanted: Wanted) -> pl.Expr:
    """Return a value as text: integers in decimal, bit-exact; an empty id counts as null."""
    value = wanted.expr.cast(pl.String)
    if wanted.kind == "id":
        value = pl.when(value != "").then(value)
    return value.alias(wanted.name)


def instant(time: TimeColumn, dtype: pl.DataType) -> pl.Expr:
    """Return a declared time in microseconds UTC; null where unreadable, before 2000 or beyond 2262.

    Integers count from the epoch in the declared unit. Timestamps with a zone, and text whose format reads an offset
    (Z is one) or epoch seconds, keep their instant; the others are wall time in the declared zone (case C5): the earlier
    of two where clocks go back, null where no such time exists.
    """
    column = pl.col(time.column)
    if dtype == pl.Null:
        return column.cast(INSTANT)
    if dtype.is_integer():
        per_second = PER_SECOND[time.unit or "us"]
        sane = column.is_between(_EARLIEST_SECOND * per_second, _LATEST_SECOND * per_second)
        kept = pl.when(sane).then(column).cast(pl.Int64)
        us = kept // 1000 if time.unit == "ns" else kept * (1_000_000 // per_second)
        return us.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    zone, zoned = time.zone, False
    if dtype == pl.String:
        moment = _moment(column, time.format)
        if time.format is not None:
            zone = _own_zone(time.format) or zone
    else:
        zoned = isinstance(dtype, pl.Datetime) and dtype.time_zone is not None
        kept = _of_sane_years(column, dtype)
        moment = kept.cast(pl.Datetime("us")) if dtype.is_(pl.Date) else kept.dt.cast_time_unit("us")
    if not zoned:
        moment = _of_sane_years(moment, pl.Datetime("us"))
        moment = moment.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    moment = moment.dt.convert_time_zone("UTC")
    seconds = moment.dt.epoch("s")
    return pl.when(seconds.is_between(_EARLIEST_SECOND, _LATEST_SECOND)).then(moment)


def _of_sane_years(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Keep dates and timestamps that may be times: of others Polars cannot tell the zone's offset, or int64 overflows."""
    low, high = _EARLIEST_SECOND - 86_400, _LATEST_SECOND  # a day to spare, for wall time
    if isinstance(dtype, pl.Datetime):
        low, high = low * PER_SECOND[dtype.time_unit], high * PER_SECOND[dtype.time_unit]
    else:
        low, high = low // 86_400, high // 86_400
    return pl.when(column.to_physical().is_between(low, high)).then(column)


def _moment(column: pl.Expr, text_format: str | None) -> pl.Expr:
    """Parse text times; an offset may be written in every way there is: +02:00, +0200, +02, Z."""
    if text_format is not None:
        text_format = re.sub(r"(?<!%)((?:%%)*)%:?z", r"\1%#z", text_format)
    return column.str.to_datetime(text_format, time_unit="us", strict=False)


@functools.cache
def _own_zone(text_format: str) -> str | None:
    """Return the zone of times that tell their own instant by a format's directives; None for wall time.

    Raises:
        PolarsError: No time can be read by the format.
    """
    if "%s" in text_format.replace("%%", ""):  # seconds since the epoch
        return "UTC"
    dtype = pl.DataFrame(schema={"t": pl.String()}).select(_moment(pl.col("t"), text_format)).schema["t"]
    return dtype.time_zone if isinstance(dtype, pl.Datetime) else None


def _check_format(text_format: str, key: str) -> None:
    """Refuse a text format by which no time can be read, or the zone that a text names would be passed over."""
    try:
        own = _own_zone(text_format)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(
            f"{key}: {text_format!r} reads no time: {_first_line(error)}; mend it, e.g. %Y-%m-%d %H:%M:%S", where=key
        ) from error
    if own is None and "%Z" in text_format.replace("%%", ""):
        raise ConfigError(
            f"{key}: {text_format!r} would pass over the zone that %Z names; deliver offsets and read them by %z, or write "
            "the one zone that all texts name as it stands there, and declare it as zone",
            where=key,
        )


def _wanted(name: str, key: str, sql: str, kind: Kind) -> Wanted:
    return Wanted(name, key, sql, parse_sql(sql, key), kind)


def _usable(kind: Kind, dtype: pl.DataType) -> bool:
    if dtype == pl.Null:
        return True
    if kind == "flag":
        return dtype == pl.Boolean
    if kind == "number":
        return dtype.is_numeric()
    plain = dtype.is_integer() or dtype == pl.String or isinstance(dtype, pl.Categorical | pl.Enum)
    return plain or (kind == "text" and (dtype.is_numeric() or dtype == pl.Boolean or dtype.is_(pl.Date)))


def _present(column: str, key: str, schema: Schema, file: str, owner: FeedConfig | TableConfig) -> None:
    if column not in schema:
        path = sorted(partitions.keys(file))
        there = sorted(
            name for name in schema if not name.startswith("\x00") and name not in path
        )  # \x00: the reader's
        raise DataContractError(
            f"{file}: column {column} is missing, {key} needs it; the columns there are: {there}"
            f"{f' and, from its path, {path}' if path else ''}"
            f"{_declare(owner, [column], 'string') if owner.format == 'ndjson' else ''}",
            where=file,
        )


def _declare(owner: FeedConfig | TableConfig, columns: list[str], kind: str) -> str:
    """Return how to declare a column's type, to follow a remedy; "" where no column or the file's format needs it."""
    if not columns or owner.format == "parquet":
        return ""
    key = f"source.{'tables' if isinstance(owner, TableConfig) else 'feeds'}[{owner.name}].types"
    rule = f"is text unless {key} declares it" if owner.format == "csv" else f"is read only where {key} declares it"
    name = columns[0] if re.fullmatch(r"[A-Za-z0-9_-]+", columns[0]) else json.dumps(columns[0])
    return f'; {"a csv" if owner.format == "csv" else "an ndjson"} column {rule}, e.g. types = {{ {name} = "{kind}" }}'


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
