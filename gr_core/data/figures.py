"""What a feed's files of a day are like, in figures: the input of data checks, kept in the commit's record.

In: raw files and contract rows, in any number of parts. Out: JSON values (`data.checks` says which).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from gr_core.config import Config, FeedConfig
from gr_core.data.expressions import feed_columns
from gr_core.lake import rawfile
from gr_core.lake.source import SourceFile


@dataclass
class NullCounts:
    """Counts nulls over contract rows that come in parts; parts may come in any order."""

    config: Config
    rows: int = 0
    nulls: Counter[str] = field(default_factory=Counter)

    def add(self, rows: pl.DataFrame) -> None:
        """Count rows that keep the contract: side features, request_id, and the bits that are known."""
        source = self.config.source
        columns = [name for name in ("request_id", *source.side_features) if name in rows.columns]
        known = [
            ((pl.col("known") & (1 << bit)) == 0).sum().alias(f"action:{name}")
            for bit, name in enumerate(source.action_names)
        ]
        counts = rows.select(*(pl.col(name).null_count() for name in columns), *known).row(0, named=True)
        self.rows += rows.height
        self.nulls.update({name: int(count) for name, count in counts.items()})

    def figures(self) -> dict[str, Any]:
        """Return `rows` and `nulls`; a column that is always null (nothing gives it) is left out."""
        given = {name: count for name, count in sorted(self.nulls.items()) if count < self.rows or self.rows == 0}
        return {"rows": self.rows, "nulls": given}


def described(
    config: Config,
    feed: FeedConfig,
    files: list[SourceFile],
    schemas: list[dict[str, pl.DataType]],
    nulls: NullCounts,
    head: int | None = None,
) -> dict[str, Any]:
    """Return what a feed's files of a day are like: the Batch's `unknown_columns` and `figures`.

    Args:
        config: The run's config.
        feed: The feed.
        files: Its files.
        schemas: Their columns as they are read.
        nulls: Filled with the rows that keep the contract.
        head: Of an ndjson file only so many records are looked at; None: all.
    """
    declared = set(feed.types) | set(feed_columns(config.source, feed))
    unknown: Counter[str] = Counter()
    columns: dict[str, set[str]] = {}
    for file, schema in zip(files, schemas, strict=True):
        names = rawfile.column_names(file.uri, feed.format, head)
        unknown.update(name for name in names if name not in declared)
        for name in names:
            columns.setdefault(name, set()).add(str(schema.get(name, "undeclared")))
    types = {name: " | ".join(sorted(kinds)) for name, kinds in sorted(columns.items())}
    figures = {"files": len(files), "columns": types, **nulls.figures()}
    return {"unknown_columns": dict(sorted(unknown.items())), "figures": figures}
