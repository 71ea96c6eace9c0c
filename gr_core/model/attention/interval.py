"""Attention over intervals by our Triton kernels: any layout, window and decay, softmax and HSTU's weights, on CUDA.

Nothing is padded and no tile list is built: a kernel's tile of queries finds its keys from lo and hi, which stay flat.
On the CPU Triton's interpreter runs them, for tests alone. Dims: `T` tokens, `N` targets, `H` heads, `K` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Pointwise
from kernels.interval_attention import Decay, Silu, interval_attention


@dataclass(frozen=True, slots=True)
class Rows:
    """Some tokens of a batch: what they see as queries, and what weights depend on besides, as queries or keys."""

    lo: Tensor
    """[n] int32."""
    hi: Tensor
    """[n] int32."""
    itself: Tensor
    """[n] int32."""
    time: Tensor | None
    """Microseconds since the epoch, [n] int64; with decay or distances."""
    position: Tensor | None
    """History tokens before each, [n] int32; with distances."""


@dataclass(frozen=True, slots=True)
class IntervalPlan(AttentionPlan):
    """Intervals of all tokens, and of targets alone."""

    kernel: ClassVar[str] = "interval"

    full: Rows
    top: Rows
    half_life_us: float | None

    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query; see `AttentionPlan`."""
        q, k = qk_TGK.chunk(2, dim=1)
        return self._attend(q, k, v_THK, self.full, pointwise)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        return self._attend(q_NHK, k_THK, v_THK, self.top, pointwise)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, pointwise: Pointwise | None) -> Tensor:
        weighting = self._weighting(rows, pointwise)
        return interval_attention(q, k, v, rows.lo, rows.hi, rows.itself, weighting=weighting, impl="triton")

    def _weighting(self, rows: Rows, pointwise: Pointwise | None) -> Decay | Silu | None:
        if pointwise is not None:
            assert rows.position is not None, "planned with Layout.distances"
            assert rows.time is not None, "planned with Layout.distances"
            assert self.full.position is not None, "of the same layout"
            assert self.full.time is not None, "of the same layout"
            return Silu(
                position_bias=pointwise.positions,
                time_bias=pointwise.times,
                divisor=pointwise.divisor,
                query_position=rows.position,
                key_position=self.full.position,
                query_time=rows.time,
                key_time=self.full.time,
            )
        if self.half_life_us is not None:
            assert rows.time is not None, "decay needs times"
            assert self.full.time is not None, "decay needs times"
            return Decay(query_time=rows.time, key_time=self.full.time, half_life_us=self.half_life_us)
        return None


def plan_interval(layout: Layout) -> IntervalPlan:
    """Lay out a batch for the interval kernels; all tensors on the CPU."""
    return IntervalPlan(
        full=_rows(layout, np.arange(len(layout.lo))),
        top=_rows(layout, layout.targets),
        half_life_us=layout.half_life_us,
    )


def _rows(layout: Layout, tokens: Longs) -> Rows:
    time = position = None
    if layout.half_life_us is not None or layout.distances:
        assert layout.time is not None, "decay and distances need times"
        time = torch.from_numpy(layout.time[tokens])
    if layout.distances:
        assert layout.position is not None, "distances need positions"
        position = _int32(layout.position[tokens])
    return Rows(
        lo=_int32(layout.lo[tokens]),
        hi=_int32(layout.hi[tokens]),
        itself=_int32(tokens),
        time=time,
        position=position,
    )


def _int32(values: Longs) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
