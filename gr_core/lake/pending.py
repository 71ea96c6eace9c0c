"""Pending files: action rows that wait for their impression, under the number of the commit that left them waiting.

Like quarantine they are written before their commit and named in its record, so what a crash or a lost race leaves
behind is never seen. Each file holds all rows that wait after its commit; the next commit looks at them again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection

import polars as pl

from gr_core.data.joining import WAITING
from gr_core.lake import besides, store


def write(root: str, number: int, night: str, rows: pl.DataFrame) -> str:
    """Write what waits after a commit and return its path below `root`; nothing is not written and has path "".

    The file's name depends on the night, so two writers that both try for one number do not meet.

    Args:
        root: URI of the lake's directory of pending rows.
        number: Commit number.
        night: The night that the commit names.
        rows: `joining.WAITING`.
    """
    if rows.is_empty():
        return ""
    path = f"commit={number}/{hashlib.sha256(night.encode()).hexdigest()[:16]}.parquet"
    _write(store.join(root, path), rows)
    return path


def drop(root: str, path: str, numbers: Collection[int]) -> int:
    """Take the rows that some ingestions read out of a file, since those were taken back; returns how many."""
    rows = read(root, path)
    gone = rows["commit"].is_in(list(numbers))
    if gone.any():
        _write(store.join(root, path), rows.filter(~gone))
    return int(gone.sum())


def read(root: str, path: str) -> pl.DataFrame:
    """Read what waits after a commit as `joining.WAITING`; path "" is nothing."""
    if not path:
        return WAITING.to_frame()
    return besides.read(store.join(root, path), "waiting actions").select(WAITING.names())


def _write(uri: str, rows: pl.DataFrame) -> None:
    content = io.BytesIO()
    rows.select(WAITING.names()).write_parquet(content, compression="zstd")
    store.write_bytes(uri, content.getvalue())
