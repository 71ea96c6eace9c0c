"""Transformer blocks on flat tokens: pre-LN, RoPE, softmax attention over intervals, SwiGLU.

Dims: `T` tokens, `N` targets, `D` width, `H` heads, `K` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gr_core.model.attention import AttentionPlan
from gr_core.model.settings import ModelConfig

ROPE_BASE = 10_000.0
_SHORTEST_SECONDS, _LONGEST_SECONDS = 60.0, 365 * 86_400.0  # periods of timestamp RoPE
Region = Callable[..., Any]


def rope_angles(position_T: Tensor, head_dim: int) -> Tensor:
    """Return RoPE's rotations e^(i * position * frequency), [T, 1, K / 2] complex64, at positions in the segment."""
    half = head_dim // 2
    frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float32, device=position_T.device) / half)
    angle = position_T.float()[:, None, None] * frequency
    return torch.complex(angle.cos(), angle.sin())


def time_angles(time_T: Tensor, head_dim: int) -> Tensor:
    """Return rotations at times, [T, 1, K / 4] complex64: scores then depend on time differences only.

    Args:
        time_T: Microseconds since some moment of the token's segment, [T], int64.
        head_dim: K, at least 4.
    """
    count = head_dim // 4
    steps = torch.arange(count, dtype=torch.float64, device=time_T.device) / max(count - 1, 1)
    slowness = _SHORTEST_SECONDS * (_LONGEST_SECONDS / _SHORTEST_SECONDS) ** steps
    # a year is 3e13 microseconds, of which fp32 keeps no minutes
    angle = time_T.double()[:, None, None] * (2 * math.pi * 1e-6) / slowness
    return torch.complex(angle.cos().float(), angle.sin().float())


def rotate(x_TGK: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (2k, 2k + 1) of every head by the position's angles; scores then depend on distances only.

    One complex multiplication: three times as fast on the CPU as sines and cosines apart.
    """
    if torch.compiler.is_compiling():  # Inductor generates no code for complex numbers
        cos, sin = torch.view_as_real(angles).unbind(-1)
        even, odd = x_TGK.float().view(*x_TGK.shape[:-1], -1, 2).unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return rotated.flatten(-2).to(x_TGK.dtype)
    pairs = torch.view_as_complex(x_TGK.float().view(*x_TGK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x_TGK.dtype)


class SwiGLU(nn.Module):
    """Gated feed-forward: [*, D] to [*, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply down(silu(gate) * up)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """One pre-LN transformer block: `project`, `attend`, `finish`; the first and last depend on token counts alone.

    Args:
        config: Width, heads, feed-forward, dropout.
        top: Only targets are queries and go on; history gives keys and values.
    """

    def __init__(self, config: ModelConfig, *, top: bool) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.head_dim = config.width // config.num_heads
        self.top = top
        # what runs around attention: gr_core.model.execution puts compiled ones here
        self.regions: tuple[Region, Region] = (type(self).project, type(self).finish)
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key_value = nn.Linear(config.width, 2 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_feedforward = nn.LayerNorm(config.width)
        self.feedforward = SwiGLU(config.width, round(config.feedforward_multiple * config.width))

    def forward(self, x_TD: Tensor, plan: AttentionPlan, targets_N: Tensor, angles: Tensor) -> Tensor:
        """Return [T, D], or [N, D] for the top block.

        Args:
            x_TD: Residual stream, [T, D].
            plan: Attention layout of the batch.
            targets_N: Token numbers of the targets, [N], int64.
            angles: RoPE's rotations of all tokens, [T, 1, K / 2] complex64.
        """
        project, finish = self.regions
        rest = x_TD.index_select(0, targets_N) if self.top else x_TD
        heads = project(self, x_TD, targets_N, angles)
        out: Tensor = finish(self, rest, self.attend(heads, plan))
        return out

    def project(self, x_TD: Tensor, targets_N: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        """Return what `attend` takes: queries, keys and values, [T or N, heads, K] each."""
        normed_TD = self.norm_attention(x_TD)
        if self.top:
            key, value = torch.chunk(self._split(self.key_value(normed_TD)), 2, dim=1)
            query = rotate(self._split(self.query(normed_TD.index_select(0, targets_N))), angles[targets_N])
            return query, rotate(key, angles), value
        weight = torch.cat([self.query.weight, self.key_value.weight])
        heads = self._split(F.linear(normed_TD, weight))
        query_key, value = torch.split(heads, [2 * self.heads, self.heads], dim=1)
        return rotate(query_key, angles), value

    def attend(self, heads: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        """Return what attention mixes of the batch, [T or N, H, K]; its shapes change from batch to batch."""
        if self.top:
            query, key, value = heads
            return plan.attend_targets(query, key, value)
        query_key, value = heads
        return plan.attend(query_key, value)

    def finish(self, rest: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output, [T or N, D], of the residual stream and of what attention mixed."""
        x = rest + self._drop(self.out(mixed.flatten(1)))
        return x + self._drop(self.feedforward(self.norm_feedforward(x)))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
