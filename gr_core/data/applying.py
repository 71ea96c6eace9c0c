"""What happens when a config's SQL meets rows that break it.

In: the values that a block derives, and the rows it derives them from. Out: nothing, or the error that names the SQL's
key. That an expression fits its columns' types is checked before (`expressions.check_value`); a CAST of text that is no
number is found out only here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import polars as pl

from gr_core.data.expressions import Wanted
from gr_core.errors import DataContractError

_FAILED = (pl.exceptions.PolarsError, pl.exceptions.PanicException)


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
