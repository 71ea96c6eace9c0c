"""Quarantine files: rows that broke the contract, under the number of the commit that counted them.

They are written before their commit and read only for commits that the event table has, so what a crash or a lost
race leaves behind is never seen.
"""

from __future__ import annotations

import hashlib
import io

import polars as pl

from gr_core.lake import besides, store

SCHEMA = pl.Schema({"reason": pl.String, "feed": pl.String, "file": pl.String, "row": pl.String})


def write(root: str, number: int, night: str, rows: pl.DataFrame) -> str:
    """Write a commit's quarantine and return its path below `root`; an empty one is not written and has path "".

    The file's name depends on the night, so two writers that both try for one number do not meet.

    Args:
        root: URI of the lake's quarantine directory.
        number: Commit number.
        night: The night that the commit names.
        rows: `SCHEMA`.
    """
    if rows.is_empty():
        return ""
    path = f"commit={number}/{hashlib.sha256(night.encode()).hexdigest()[:16]}.parquet"
    content = io.BytesIO()
    rows.select(SCHEMA.names()).write_parquet(content, compression="zstd")
    store.write_bytes(store.join(root, path), content.getvalue())
    return path


def read(root: str, path: str) -> pl.DataFrame:
    """Read one commit's quarantine as `SCHEMA`; path "" is an empty one."""
    if not path:
        return SCHEMA.to_frame()
    return besides.read(store.join(root, path), "quarantined rows").select(SCHEMA.names())
