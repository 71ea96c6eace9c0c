"""Hive partitions: columns that stand in a raw file's path, as in dt=2025-06-01/country=de/part-0.parquet.

In: a file's URI and the declared types. Out: the columns that its folders give, each with its one value. Nothing is
inferred: a key is text unless `types` declares it, so that hour=07 stays 07.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

import polars as pl

from gr_core.errors import DataContractError

NULL = "__HIVE_DEFAULT_PARTITION__"  # how Hive and Spark write a null

Value = str | int | float | bool | None


def keys(uri: str) -> dict[str, str | None]:
    """Return the key=value folders of a file's path, percent-decoded; of a key that stands twice, the last."""
    folders = uri.split("/")[:-1]
    pairs = [folder.partition("=") for folder in folders if "=" in folder]
    return {unquote(key): None if value == NULL else unquote(value) for key, _, value in pairs if key}


def typed(uri: str, declared: Mapping[str, pl.DataType], owner: str) -> dict[str, tuple[pl.DataType, Value]]:
    """Return a path's columns in their declared types.

    Args:
        uri: The file.
        declared: Column -> type as it is read; a key that is not in it is text.
        owner: Dotted config key of the feed or table, for messages.

    Returns:
        Column -> (type, value).

    Raises:
        DataContractError: A value is not of its declared type.
    """
    found: dict[str, tuple[pl.DataType, Value]] = {}
    for key, text in keys(uri).items():
        dtype = declared.get(key, pl.String())
        value = _value(text, dtype)
        if value is None and text is not None:
            raise DataContractError(
                f"{uri}: the path gives {key} = {text!r}, which is no {dtype}; mend the path, or declare {key} as "
                f"string in {owner}.types",
                where=uri,
            )
        found[key] = (dtype, value)
    return found


def _value(text: str | None, dtype: pl.DataType) -> Value:
    if text is None or dtype == pl.String:
        return text
    if dtype == pl.Boolean:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    value: Value = pl.Series([text], dtype=pl.String).cast(dtype, strict=False).item()
    return value
