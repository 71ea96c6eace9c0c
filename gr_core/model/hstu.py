"""HSTU's block (arXiv 2402.17152, section 3): pointwise SiLU attention, relative position and time bias, a gate.

    U, V, Q, K = silu(f1(norm(x)));  A = silu(Q K^T / sqrt(K) + bias) / divisor;  y = x + f2(norm(A V) * U)

The divisor is the same for every token, whatever its history's length. Queries are scaled by 1 / sqrt(K), as in the authors'
later code. Dims: `T` tokens, `N` targets, `D` width, `H` heads, `K` head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gr_core.model.attention import AttentionPlan, Pointwise
from gr_core.model.attention.plan import NUM_DISTANCES
from gr_core.model.blocks import Region
from gr_core.model.settings import ModelConfig

_EPSILON = 1e-6  # of the norm behind attention: below it a mix is small because little was attended to


class HstuBlock(nn.Module):
    """One HSTU block: `project`, `attend`, `finish`, as `gr_core.model.blocks.Block` has them; it has no feed-forward.

    Args:
        config: Width, heads, dropout, divisor.
        top: Only targets are queries and go on; history gives keys and values.
    """

    def __init__(self, config: ModelConfig, *, top: bool) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.head_dim = config.width // config.num_heads
        self.top = top
        self.regions: tuple[Region, Region] = (type(self).project, type(self).finish)
        self.dropout = config.dropout
        self.divisor = config.hstu_divisor
        self.norm_attention = nn.LayerNorm(config.width)
        self.gate_query = nn.Linear(config.width, 2 * config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.norm_mixed = nn.LayerNorm(config.width, eps=_EPSILON)
        self.out = nn.Linear(config.width, config.width)
        self.position_bias = nn.Parameter(torch.empty(NUM_DISTANCES, config.num_heads).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.empty(NUM_DISTANCES, config.num_heads).normal_(std=0.02))

    def forward(self, x_TD: Tensor, plan: AttentionPlan, targets_N: Tensor, angles: Tensor) -> Tensor:
        """Return [T, D], or [N, D] for the top block.

        Args:
            x_TD: Residual stream, [T, D].
            plan: Attention layout of the batch, with distances.
            targets_N: Token numbers of the targets, [N], int64.
            angles: Not used: positions and times enter by the bias.
        """
        project, finish = self.regions
        rest = x_TD.index_select(0, targets_N) if self.top else x_TD
        gate, heads = project(self, x_TD, targets_N, angles)
        out: Tensor = finish(self, rest, gate, self.attend(heads, plan))
        return out

    def project(self, x_TD: Tensor, targets_N: Tensor, angles: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gate, [T or N, D], and what `attend` takes."""
        del angles
        normed_TD = self.norm_attention(x_TD)
        key, value = torch.chunk(self._split(F.silu(self.key_value(normed_TD))), 2, dim=1)
        if self.top:
            normed_TD = normed_TD.index_select(0, targets_N)
        gate, query = torch.chunk(F.silu(self.gate_query(normed_TD)), 2, dim=1)
        return gate, (self._split(query), key, value)

    def attend(self, heads: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        """Return what attention mixes of the batch, [T or N, H, K]."""
        query, key, value = heads
        weighing = Pointwise(positions=self.position_bias, times=self.time_bias, divisor=self.divisor)
        if self.top:
            return plan.attend_targets(query, key, value, weighing)
        return plan.attend(torch.cat([query, key], dim=1), value, weighing)

    def finish(self, rest: Tensor, gate: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output, [T or N, D], of the residual stream, the gate and what attention mixed."""
        out = self.out(self.norm_mixed(mixed.flatten(1)) * gate)
        return rest + (F.dropout(out, self.dropout, self.training) if self.dropout else out)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)
