"""Which tiles of 128 queries need which blocks of 128 keys: FlexAttention's block mask straight from lo and hi.

Work and memory follow the tiles that are touched, plus FlexAttention's own index of [query tiles, key blocks]. No
predicate is evaluated over T x T. Dims: `Q` queries, `T` keys, both padded to whole tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gr_core.model.attention.plan import Longs

TILE = 128
"""Queries of a tile and keys of a block: FlexAttention's own default."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """For each row tile the column blocks that it needs, [1, 1, rows] and [1, 1, rows, columns], int32."""

    count: Tensor
    index: Tensor
    """The first `count` entries of a row, ascending, are meant."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Intervals of some queries, and the blocks that hold them."""

    lo: Tensor
    """First key of each query, [Q] int32."""
    hi: Tensor
    """One past the last key, [Q] int32."""
    itself: Tensor
    """The query's own place among the keys, [Q] int32."""
    partial: Blocks
    """Blocks of which some (query, key) is masked, by query tile."""
    full: Blocks
    """Blocks of which none is, by query tile."""
    partial_by_key: Blocks
    """The same by key block: backward goes through queries."""
    full_by_key: Blocks


def padded_to_tiles(count: int) -> int:
    """Return the smallest number of whole tiles' places, at least one tile's, that holds so many tokens."""
    return max(-(-count // TILE), 1) * TILE


def tile(lo: Longs, hi: Longs, itself: Longs, segment: Longs, *, num_queries: int, num_keys: int) -> Tiles:
    """Find the blocks of every query tile, per segment from its smallest lo to its largest hi.

    Args:
        lo: First key of each query, [n].
        hi: One past the last key, [n].
        itself: The query's own place among the keys, [n].
        segment: Segment number of each query, ascending, [n].
        num_queries: Q, whole tiles, at least n; queries beyond n attend to the last key alone, so that they stay finite.
        num_keys: T, whole tiles.
    """
    padding = (0, num_queries - len(lo))
    first, end = np.pad(lo, padding), np.pad(hi, padding)
    own = np.pad(itself, padding, constant_values=num_keys - 1)
    group = np.pad(segment, padding, constant_values=-1)
    query_tile = np.arange(num_queries) // TILE
    blocks = num_keys // TILE

    runs = np.flatnonzero(np.diff(query_tile, prepend=-1) | np.diff(group, prepend=-2))
    some = end > first
    least = np.minimum.reduceat(np.where(some, first, num_keys), runs)
    most = np.maximum.reduceat(np.where(some, end, 0), runs)
    near, far = np.minimum.reduceat(own, runs), np.maximum.reduceat(own, runs) + 1
    of = query_tile[runs]
    touched = np.unique(
        np.concatenate(
            [_cells(of, least // TILE, -(-most // TILE), blocks), _cells(of, near // TILE, -(-far // TILE), blocks)]
        )
    )
    # every query of a tile sees [largest lo, smallest hi): the blocks inside need no mask
    tiles = np.arange(num_queries // TILE)
    inside_from = -(-first.reshape(-1, TILE).max(axis=1) // TILE)
    inside_to = end.reshape(-1, TILE).min(axis=1) // TILE
    whole = _cells(tiles, inside_from, inside_to, blocks)
    rest = np.setdiff1d(touched, whole, assume_unique=True)
    return Tiles(
        lo=_int32(first),
        hi=_int32(end),
        itself=_int32(own),
        partial=_blocks(rest // blocks, rest % blocks, len(tiles), blocks),
        full=_blocks(whole // blocks, whole % blocks, len(tiles), blocks),
        partial_by_key=_by_key(rest, len(tiles), blocks),
        full_by_key=_by_key(whole, len(tiles), blocks),
    )


def _cells(row: Longs, begin: Longs, end: Longs, columns: int) -> Longs:
    """Return row * columns + column of every column in [begin, end) of every row."""
    count = np.maximum(end - begin, 0)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found: Longs = np.repeat(row * columns + begin, count) + within
    return found


def _by_key(cells: Longs, rows: int, columns: int) -> Blocks:
    turned = np.sort(cells % columns * rows + cells // columns)
    return _blocks(turned // rows, turned % rows, columns, rows)


def _blocks(row: Longs, column: Longs, rows: int, columns: int) -> Blocks:
    count = np.bincount(row, minlength=rows)
    index = np.zeros((rows, columns), np.int32)
    index[row, np.arange(len(row)) - (np.cumsum(count) - count)[row]] = column
    return Blocks(_int32(count)[None, None], torch.from_numpy(index)[None, None])


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
