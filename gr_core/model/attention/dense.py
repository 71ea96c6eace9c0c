"""Dense attention: every token against every token, by the kernels' reference. What the other paths are compared with.

Its memory grows with the square of the batch's tokens, so it is for tests and small packs. In fp64 it stays fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gr_core.model.attention.plan import AttentionPlan, Layout, Pointwise, log_bucket
from kernels.interval_attention import interval_attention_reference


@dataclass(frozen=True, slots=True)
class DensePlan(AttentionPlan):
    """Intervals of all tokens, and what their weights depend on besides. T tokens, N targets."""

    kernel: ClassVar[str] = "dense"

    lo: Tensor
    """[T] int64."""
    hi: Tensor
    """[T] int64."""
    targets: Tensor
    """[N] int64."""
    decay: Tensor | None
    """Score bias of time decay, [T, T] fp64: -ln 2 * age / half-life."""
    distances: Tensor | None
    """Log-bucketed distances in position and in time of query and key, [2, T, T] uint8."""

    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query; see `AttentionPlan`."""
        q, k = qk_TGK.chunk(2, dim=1)
        return self._attend(q, k, v_THK, torch.arange(len(self.lo), device=q.device), pointwise)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        return self._attend(q_NHK, k_THK, v_THK, self.targets, pointwise)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pointwise: Pointwise | None) -> Tensor:
        bias = None if self.decay is None else self.decay[rows]
        if pointwise is not None:
            assert self.distances is not None, "planned with Layout.distances"
            position, time = self.distances[:, rows].int()
            learned = F.embedding(position, pointwise.positions) + F.embedding(time, pointwise.times)
            bias = learned.permute(2, 0, 1)
        divisor = None if pointwise is None else pointwise.divisor
        lo, hi = self.lo[rows], self.hi[rows]
        return interval_attention_reference(q, k, v, lo, hi, rows, bias=bias, divisor=divisor)


def plan_dense(layout: Layout) -> DensePlan:
    """Lay out a batch for dense attention; all tensors on the CPU."""
    decay = distances = None
    if layout.half_life_us is not None:
        assert layout.time is not None, "decay needs times"
        age = np.maximum(layout.time[:, None] - layout.time, 0)
        decay = torch.from_numpy(-math.log(2) * (age / layout.half_life_us))
    if layout.distances:
        assert layout.time is not None, "distances need times"
        assert layout.position is not None, "distances need positions"
        apart = [log_bucket(layout.position[:, None] - layout.position)]
        apart.append(log_bucket((layout.time[:, None] - layout.time) / 1e6))
        distances = torch.from_numpy(np.stack(apart))
    return DensePlan(
        lo=torch.from_numpy(layout.lo),
        hi=torch.from_numpy(layout.hi),
        targets=torch.from_numpy(layout.targets),
        decay=decay,
        distances=distances,
    )
