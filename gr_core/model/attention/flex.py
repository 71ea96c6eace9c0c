"""FlexAttention over intervals: any layout, window and decay, on CUDA; on the CPU only its eager forward, for tests.

Shapes are static: keys are padded to the token budget, targets to a quarter of it or all of it, so one graph serves all
batches (two where targets are many). No batch's length is baked in: intervals and times are tensors that a graph reads.
Dims: `Q` padded queries, `T` padded keys, `H` heads, `K` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Pointwise
from gr_core.model.attention.tiles import TILE, Tiles, padded_to_tiles, tile

_FEW_TARGETS = 4  # targets are padded to 1 / this of the keys where that holds them


@dataclass(frozen=True, slots=True)
class Ages:
    """Time decay: half-lives since the segment's first token, fp32."""

    query: Tensor
    """[Q]."""
    key: Tensor
    """[T]."""


@dataclass(frozen=True, slots=True)
class FlexRows:
    """Some tokens of a batch as queries of FlexAttention."""

    tiles: Tiles
    ages: Ages | None

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: [n, H, K] and twice [t, H, K], to [n, H, K]; padded and cut here."""
        num_queries, num_keys = self.tiles.lo.numel(), self.tiles.partial.index.shape[-1] * TILE
        out = _flex(q.device.type)(
            _padded(q, num_queries),
            _padded(k, num_keys),
            _padded(v, num_keys),
            score_mod=None if self.ages is None else _decay(self.ages),
            block_mask=block_mask(self.tiles),
        )
        mixed: Tensor = out[0].transpose(0, 1)[: len(q)]
        return mixed


@dataclass(frozen=True, slots=True)
class FlexPlan(AttentionPlan):
    """All tokens, and targets only, as queries of FlexAttention."""

    kernel: ClassVar[str] = "flex"

    full: FlexRows
    top: FlexRows

    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query; see `AttentionPlan`."""
        assert pointwise is None, "FlexAttention weighs by softmax alone; choose_attention refuses HSTU"
        q, k = qk_TGK.chunk(2, dim=1)
        return self.full.run(q, k, v_THK)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        assert pointwise is None, "FlexAttention weighs by softmax alone; choose_attention refuses HSTU"
        return self.top.run(q_NHK, k_THK, v_THK)


def plan_flex(layout: Layout, *, token_budget: int) -> FlexPlan:
    """Lay out a batch for FlexAttention; all tensors on the CPU.

    Args:
        layout: The batch's layout.
        token_budget: Tokens that a batch may hold; a larger batch is padded to its own whole tiles.
    """
    every = np.arange(len(layout.lo))
    return FlexPlan(
        full=flex_rows(layout, every, token_budget=token_budget, all_rows=True),
        top=flex_rows(layout, layout.targets, token_budget=token_budget),
    )


def flex_rows(layout: Layout, rows: Longs, *, token_budget: int, all_rows: bool = False) -> FlexRows:
    """Prepare some tokens as queries over all keys of the batch.

    Args:
        layout: The batch's layout.
        rows: Token numbers, ascending.
        token_budget: Tokens that a batch may hold.
        all_rows: Pad to all keys, also where the rows are few.
    """
    num_keys = padded_to_tiles(max(len(layout.lo), token_budget))
    few = padded_to_tiles(num_keys // _FEW_TARGETS)
    num_queries = num_keys if all_rows or len(rows) > few else few
    tiles = tile(
        layout.lo[rows],
        layout.hi[rows],
        rows,
        layout.segment_of[rows],
        num_queries=num_queries,
        num_keys=num_keys,
    )
    ages = None
    if layout.half_life_us is not None:
        assert layout.time is not None, "decay needs times"
        age = ((layout.time - layout.time[layout.first_of]) / layout.half_life_us).astype(np.float32)
        ages = Ages(query=_filled(age[rows], num_queries), key=_filled(age, num_keys))
    return FlexRows(tiles, ages)


def block_mask(tiles: Tiles) -> BlockMask:
    """Return FlexAttention's mask of some tiles; its predicate is asked inside partial blocks only."""
    lo, hi, itself = tiles.lo, tiles.hi, tiles.itself

    def attends(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key >= lo[query]) & (key < hi[query])) | (key == itself[query])

    num_keys = tiles.partial.index.shape[-1] * TILE
    return BlockMask(
        seq_lengths=(lo.numel(), num_keys),
        kv_num_blocks=tiles.partial.count,
        kv_indices=tiles.partial.index,
        full_kv_num_blocks=tiles.full.count,
        full_kv_indices=tiles.full.index,
        q_num_blocks=tiles.partial_by_key.count,
        q_indices=tiles.partial_by_key.index,
        full_q_num_blocks=tiles.full_by_key.count,
        full_q_indices=tiles.full_by_key.index,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=attends,
    )


def _decay(ages: Ages) -> Callable[..., Tensor]:
    query_age, key_age = ages.query, ages.key

    def halve(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - math.log(2) * (query_age[query] - key_age[key])

    return halve


@cache
def _flex(device: str) -> Callable[..., Any]:
    """Return FlexAttention for a kind of device: compiled on CUDA, where eager mode would make T x T scores."""
    if device == "cpu":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _padded(x: Tensor, count: int) -> Tensor:
    """Return [n, H, K] as [1, H, count, K], zeros at the end."""
    return F.pad(x, (0, 0, 0, 0, 0, count - len(x))).transpose(0, 1)[None]


def _filled(values: Any, count: int) -> Tensor:
    return torch.from_numpy(np.pad(values, (0, count - len(values))))
