"""What a weight of interval attention depends on besides the score: a key's age, or HSTU's biases by distance.

Dims: `N` queries, `T` keys, `H` heads, `B` buckets of a distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BUCKETS = 64
"""Buckets of a distance, half an octave each: enough for 2^31 seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decay:
    """Softmax weights that halve for each half-life of a key's age against its query, before they are normalised."""

    query_time: Tensor
    """Microseconds since the epoch, [N] int64."""
    key_time: Tensor
    """[T] int64."""
    half_life_us: float

    def bias(self) -> Tensor:
        """Return what is added to the scores, -ln 2 * age / half-life, [N, T] fp64."""
        age_NT = (self.query_time[:, None] - self.key_time).clamp(min=0)
        return -math.log(2) * (age_NT.double() / self.half_life_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class Silu:
    """HSTU's weights (arXiv 2402.17152): silu(score + position bias + time bias) / divisor; biases are differentiable."""

    position_bias: Tensor
    """Bias of each log-bucketed distance in position, [64, H] fp32."""
    time_bias: Tensor
    """Bias of each log-bucketed distance in seconds, [64, H] fp32."""
    divisor: float
    query_position: Tensor
    """History tokens before each query, [N] int32."""
    key_position: Tensor
    """[T] int32."""
    query_time: Tensor
    """Microseconds since the epoch, [N] int64."""
    key_time: Tensor
    """[T] int64."""

    def bias(self) -> Tensor:
        """Return what is added to the scores, [H, N, T]."""
        far_NT = log_bucket(self.query_position[:, None] - self.key_position)
        ago_NT = log_bucket((self.query_time[:, None] - self.key_time) / 1e6)
        return (self.position_bias[far_NT] + self.time_bias[ago_NT]).permute(2, 0, 1)


def log_bucket(distance: Tensor) -> Tensor:
    """Return distances (below 0 as 0) as buckets of half an octave, int64: floor(2 log2(1 + d)), at most 63."""
    bucket = 2 * torch.log2(1.0 + distance.double().clamp(min=0))
    return bucket.long().clamp(max=NUM_BUCKETS - 1)
