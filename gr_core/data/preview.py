"""A look at the first rows of a feed: what each raw column becomes, and which rows break the contract, and why.

In: a feed's files and how many rows to look at. Out: a `Preview` of plain values; users' ids are never in it.
`daybreak check` prints it. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any

import polars as pl

from gr_core.config import Config, FeedConfig, TableConfig, TimeColumn
from gr_core.data import actions, contract, expressions
from gr_core.data.figures import NullCounts
from gr_core.data.rawrows import REASON, applied, read_columns
from gr_core.lake import rawfile
from gr_core.lake.source import SourceFile, own_schemas
from gr_core.schema import action_time

MASKED = "***"
_EXAMPLES, _EXAMPLE_LENGTH, _ROW_LENGTH = 3, 40, 300
_SANE_SECONDS = (946_684_800, 4_102_444_800)  # 2000 to 2100
_BECOMES = {"id": "text", "text": "text", "flag": "boolean", "number": "seconds"}
_TIME = "%Y-%m-%d %H:%M:%S%.3fZ"
_MOST = 0.9  # of the numbers, to call a unit by them


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Sampled rows that break the contract for one reason."""

    reason: str
    rows: int
    file: str
    """Of the first such row."""
    row: int
    """Its place in the file, from 0."""
    text: str
    """The row with its users masked; empty where it cannot be read."""
    columns: tuple[str, ...]
    """Raw columns that the reason is about."""
    hint: str = ""


@dataclass(kw_only=True)
class Preview:
    """What the sampled rows of one feed say."""

    columns: list[dict[str, Any]]
    """One a contract column: column, sql, raw {raw column: type}, becomes, nulls (share), examples."""
    rows: int = 0
    events: list[pl.DataFrame] = field(default_factory=list)
    """Contract rows that keep the contract, a part a file (of an actions feed: its actions)."""
    broken: list[Broken] = field(default_factory=list)

    @property
    def reasons(self) -> dict[str, int]:
        """Sampled rows that break the contract, by reason."""
        return {one.reason: one.rows for one in sorted(self.broken, key=lambda one: one.reason)}


def look(
    config: Config, day: date, feed: FeedConfig, files: Sequence[tuple[SourceFile, dict[str, pl.DataType]]], head: int
) -> Preview:
    """Look at the first rows of some files of a feed.

    Args:
        config: The run's config.
        day: The feed day.
        feed: The feed, of any role.
        files: Files with their columns as they are read (`source.feed_schemas`), checked before.
        head: Rows of each file.

    Raises:
        DataContractError: A file cannot be read.
    """
    raws, found = [], Preview(columns=[])
    for file, schema in files:
        raw = _head(config, feed, file, schema, head)
        judge = actions.action_rows if feed.role == "actions" else contract.contract_rows
        rows = judge(config, day, feed, raw, schema)
        found.rows += rows.height
        found.events.append(rows.filter(pl.col(REASON).is_null()).drop(REASON))
        _note(config, feed, file, raw, rows, found, head)
        raws.append((raw, schema))
    found.columns = _columns(config, feed, raws)
    return found


def _head(
    config: Config, feed: FeedConfig, file: SourceFile, schema: dict[str, pl.DataType], head: int
) -> pl.DataFrame:
    """Read the first rows of the columns that the config reads; those that the file lacks are null."""
    names = expressions.feed_columns(config.source, feed)
    (present,) = own_schemas(feed, [file])
    return read_columns(feed, file, names, present, schema, head=head).with_row_index(contract.ROW)


def _note(
    config: Config, feed: FeedConfig, file: SourceFile, raw: pl.DataFrame, rows: pl.DataFrame, found: Preview, head: int
) -> None:
    """Add a file's broken rows to what was found; the first row of each reason is shown."""
    places = rows.select(REASON).with_row_index("place").drop_nulls(REASON)
    counted = places.group_by(REASON).agg(pl.len(), pl.col("place").min()).sort(REASON)
    known = {one.reason: one for one in found.broken}
    for reason, number, place in counted.iter_rows():
        earlier = known.get(reason)
        if earlier is not None:
            found.broken[found.broken.index(earlier)] = replace(earlier, rows=earlier.rows + number)
            continue
        row = _row(config, feed, file, place, head)
        columns, hint = _about(config, feed, reason, raw, row)
        first = {name: row[name] for name in columns if name in row} if row is not None else {}
        text = json.dumps({**first, **row}, default=str)[:_ROW_LENGTH] if row is not None else ""
        shown = {"reason": reason, "rows": number, "file": file.uri, "row": place, "text": text}
        found.broken.append(Broken(**shown, columns=columns, hint=hint))


def _row(config: Config, feed: FeedConfig, file: SourceFile, place: int, head: int) -> dict[str, Any] | None:
    """Return the columns of a raw row that the config reads, users masked; None where the row is no record."""
    (text,) = rawfile.raw_rows(file.uri, feed.format, [place], head)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    hidden = expressions.user_columns(config.source, feed)
    names = [name for name in expressions.feed_columns(config.source, feed) if name in row]
    return {name: MASKED if name in hidden and row[name] is not None else row[name] for name in names}


def _about(
    config: Config, feed: FeedConfig, reason: str, raw: pl.DataFrame, row: dict[str, Any] | None
) -> tuple[tuple[str, ...], str]:
    """Return the raw columns that a reason is about, and what may be wrong with them."""
    values = {value.name: value.roots for value in expressions.feed_values(config.source, feed)}
    shown = feed.acted_at if feed.role == "actions" else feed.shown_at
    ids = [column for name, roots in values.items() if name.startswith("id:") for column in roots]
    about = {
        "null_user": values.get("user_id", []),
        "null_item": values.get("item_id", []),
        "null_id": ids,
        "bad_delay": values.get("delay", []),
        "bad_value": _wrong_values(feed, row),
        **dict.fromkeys(("null_time", "bad_time", "clock_skew"), [shown.column] if shown else []),
    }
    hint = time_hint(shown, raw) if shown is not None and reason in ("bad_time", "clock_skew") else ""
    return tuple(about.get(reason, [])), hint


def _wrong_values(feed: FeedConfig, row: dict[str, Any] | None) -> list[str]:
    """Return the columns of a raw row whose value is not of the declared type."""
    wrong = []
    for name, kind in feed.types.items():
        value = (row or {}).get(name)
        if value is None or value == MASKED or kind == "string":
            continue
        text = pl.Series([str(value)], dtype=pl.String)
        truth = str(value).lower() in ("true", "false", "0", "1")
        good = truth if kind == "bool" else text.cast(expressions.DECLARED[kind], strict=False).item() is not None
        wrong += [] if good else [name]
    return wrong


def time_hint(time: TimeColumn, raw: pl.DataFrame) -> str:
    """Say which unit the numbers of a declared time look like, where it is another one (case C12); else ""."""
    column = raw[time.column]
    if time.unit is None or not column.dtype.is_integer() or column.null_count() == column.len():
        return ""
    numbers = column.drop_nulls()
    for unit, per_second in expressions.PER_SECOND.items():
        low, high = (second * per_second for second in _SANE_SECONDS)
        if unit != time.unit and float(numbers.is_between(low, high).sum()) >= _MOST * numbers.len():
            middle = int(numbers.sort()[numbers.len() // 2])
            moment = datetime.fromtimestamp(middle / per_second, UTC)
            return (
                f'read as unit "{unit}" they are times such as {moment:%Y-%m-%d %H:%M:%S}Z; declared is "{time.unit}"'
            )
    return ""


def _columns(
    config: Config, feed: FeedConfig, raws: Sequence[tuple[pl.DataFrame, dict[str, pl.DataType]]]
) -> list[dict[str, Any]]:
    """Describe what each contract column is made of, over all sampled files."""
    hidden = expressions.user_columns(config.source, feed)
    described = []
    for value in expressions.feed_values(config.source, feed):
        parts = [_texts(raw, value) for raw, _ in raws]
        described.append(
            _described(value.name, value.sql, value.roots, _BECOMES[value.kind], raws, parts)
            | ({"examples": [MASKED]} if hidden & set(value.roots) else {})
        )
    for name, (_, time) in expressions.feed_times(feed).items():
        parts = [
            _good(raw)
            .select(expressions.instant(time, schema[time.column]).dt.to_string(_TIME).alias(name))
            .to_series()
            for raw, schema in raws
        ]
        told = time.unit or time.format or "timestamp"
        described.append(
            _described(name, f"{time.column} ({told}, {time.zone})", [time.column], "time UTC", raws, parts)
        )
    return described


def _texts(raw: pl.DataFrame, value: expressions.Wanted) -> pl.Series:
    with applied([value], rows := _good(raw)):
        return rows.select(expressions.text(value)).to_series()


def _good(raw: pl.DataFrame) -> pl.DataFrame:
    return raw.filter(pl.col(rawfile.PROBLEM).is_null())


def _described(
    name: str,
    sql: str,
    roots: Iterable[str],
    becomes: str,
    raws: Sequence[tuple[pl.DataFrame, dict[str, pl.DataType]]],
    parts: Sequence[pl.Series],
) -> dict[str, Any]:
    whole = pl.concat([pl.Series(name, [], dtype=pl.String), *(part.rename(name) for part in parts)])
    types = {root: " | ".join(sorted({str(schema[root]) for _, schema in raws})) for root in roots}
    examples = whole.drop_nulls().unique(maintain_order=True).head(_EXAMPLES).to_list()
    return {
        "column": _named(name),
        "sql": sql,
        "raw": types,
        "becomes": becomes,
        "nulls": round(whole.null_count() / whole.len(), 4) if whole.len() else 0.0,
        "examples": [text[:_EXAMPLE_LENGTH] for text in examples],
    }


def _named(name: str) -> str:
    """Return the contract column that a value becomes (part of), as the event table names it."""
    kind, _, rest = name.partition(":")
    plain = {"id": "event_id", "delay": "visible_at"}
    return plain.get(kind) or (action_time(rest) if kind == "time" else rest or kind)


def table_columns(
    table: TableConfig, file: SourceFile, schema: dict[str, pl.DataType], head: int
) -> list[dict[str, Any]]:
    """Describe what the side features of a table are made of, from the first rows of one of its files.

    Args:
        table: The side table.
        file: One of its files.
        schema: The file's columns, checked before.
        head: Rows to look at.
    """
    values = expressions.table_values(table)
    users_of = {root for value in values if value.name == "on:user_id" for root in value.roots}
    raw = rawfile.read_frame(file.uri, table.format, table.types, expressions.raw_columns(values), schema, head)
    return [
        _described(value.name, value.sql, value.roots, _BECOMES[value.kind], [(raw, schema)], [_texts(raw, value)])
        | ({"examples": [MASKED]} if users_of & set(value.roots) else {})
        for value in values
        if value.name.startswith("side:")
    ]


def null_counts(config: Config, preview: Preview) -> NullCounts:
    """Count the nulls of the sampled impressions that keep the contract; action rows have none to count."""
    counted = NullCounts(config)
    for part in preview.events:
        if "known" in part.columns:
            counted.add(part)
    return counted
