"""Parquet files beside the event table, which its commits name: quarantined rows, and actions that wait."""

from __future__ import annotations

import io

import polars as pl

from gr_core.errors import FormatError
from gr_core.lake import store


def read(uri: str, what: str) -> pl.DataFrame:
    """Read such a file whole.

    Args:
        uri: The file.
        what: What it holds, for the message.

    Raises:
        FormatError: It is damaged or gone; it is named.
    """
    try:
        return pl.read_parquet(io.BytesIO(store.read_bytes(uri)))
    except (pl.exceptions.PolarsError, FileNotFoundError) as error:
        why = "missing" if isinstance(error, FileNotFoundError) else f"damaged: {error}"
        raise FormatError(
            f"{uri}, the {what} of a commit, is {why}; restore this file from a backup (the event table is whole), or start "
            "a new home with --home",
            where=uri,
        ) from error
