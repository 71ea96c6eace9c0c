"""Raw rows on their way into the contract: read by declaration, and what happens where a config's SQL meets bad ones.

In: a feed's files and the values that its config derives. Out: frames of the raw columns that the config reads, or the
error that names what makes rows unusable. That an expression fits its columns' types is checked before
(`expressions.check_value`); a CAST of text that is no number is found out only here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date

import polars as pl

from gr_core.config import FeedConfig
from gr_core.data.expressions import Wanted
from gr_core.errors import DataContractError
from gr_core.lake import rawfile
from gr_core.lake.source import SourceFile

REASON = "\x00reason"  # why a row breaks the contract, null where it does not

_FAILED = (pl.exceptions.PolarsError, pl.exceptions.PanicException)


def read_columns(
    feed: FeedConfig,
    file: SourceFile,
    names: Sequence[str],
    present: Mapping[str, pl.DataType],
    schema: Mapping[str, pl.DataType],
    *,
    head: int | None = None,
    part: tuple[int, int] | None = None,
) -> pl.DataFrame:
    """Read raw columns of a feed's file; those that only others of the day's files have are null.

    Args:
        feed: The feed.
        file: One of its files.
        names: The columns.
        present: The columns that the file has (`source.own_schemas`).
        schema: These and the declared ones that it lacks (`source.completed`).
        head: As in `rawfile.read_frame`.
        part: As in `rawfile.read_frame`.

    Returns:
        The columns and rawfile.PROBLEM.

    Raises:
        DataContractError: The file cannot be read.
    """
    own = [name for name in names if name in present]
    frame = rawfile.read_frame(file.uri, feed.format, feed.types, own, schema, head, part)
    absent = [pl.lit(None, schema[name]).alias(name) for name in names if name not in present]
    return frame.with_columns(absent).select(*names, rawfile.PROBLEM)


@contextlib.contextmanager
def applied(values: Iterable[Wanted], rows: pl.DataFrame) -> Iterator[None]:
    """Name the SQL that some rows' values break; the values are not told, since they may name a user.

    Raises:
        DataContractError: Polars gave up on one of the values within the block.
    """
    try:
        yield
    except _FAILED:
        for value in values:
            try:
                rows.select(value.expr)
            except _FAILED:
                raise DataContractError(
                    f"{value.key} = {value.sql!r} cannot be applied to what {', '.join(value.roots)} holds in some "
                    "rows; mend these rows or the expression: TRY_CAST gives null where CAST fails, and NULLIF(x, 0) "
                    "keeps a divisor from being 0",
                    where=value.key,
                ) from None
        raise


def nothing_usable(feed: FeedConfig, day: date, reasons: pl.Series, first: str) -> DataContractError:
    """Say why a day cannot be what its declarations say: committed, it would be an empty day for good.

    Args:
        feed: The feed.
        day: The feed day.
        reasons: Why each row that was read breaks the contract.
        first: The file of the first one.
    """
    counts = reasons.value_counts(name="rows").sort("rows", reasons.name, descending=[True, False]).iter_rows()
    time, others = ("acted_at", "types, on") if feed.role == "actions" else ("shown_at", "types, ids, side tables")
    return DataContractError(
        f"feed {feed.name} of {day}: none of the {reasons.len()} rows read is usable "
        f"({', '.join(f'{reason} {count}' for reason, count in counts)}), first file {first}; mend the files, or what "
        f"source.feeds[{feed.name}] declares of them ({time}'s unit, format and zone, {others})",
        where=first,
    )
