"""FlashAttention over sequences of their own lengths where tokens are plainly causal, FlexAttention for the rest.

A token is plainly causal where it sees everything before it in its segment. In `targets` without a window that is all
history (and mostly the first target); in `interleaved` a whole segment marked causal. Each segment's longest plainly
causal run from its first token goes through torch's `varlen_attn`, the other tokens and the top layer's targets through
FlexAttention, so every layout is computed exactly. On CUDA only, in half precision.
Dims: `T` tokens, `C` plainly causal tokens, `R` the others, `H` heads, `K` head dim.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gr_core.model.attention.flex import FlexRows, flex_rows
from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Pointwise


@dataclass(frozen=True, slots=True)
class VarlenPlan(AttentionPlan):
    """Plainly causal runs of all segments, and the rest."""

    kernel: ClassVar[str] = "varlen+flex"

    causal: Tensor
    """Token numbers of the runs, [C] int64."""
    starts: Tensor
    """Where each run begins in `causal`, and the end, [runs + 1] int32."""
    longest: int
    """Bound on a run's length, a power of two: lengths are not baked in."""
    others: Tensor
    """Token numbers of the rest, [R] int64."""
    rest: FlexRows | None
    """The rest as queries; None where there is none."""
    top: FlexRows

    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query; see `AttentionPlan`."""
        assert pointwise is None, "FlashAttention weighs by softmax alone; choose_attention refuses HSTU"
        q, k = qk_TGK.chunk(2, dim=1)
        out = torch.empty_like(v_THK)
        if self.causal.numel():
            q_C, k_C, v_C = (x.index_select(0, self.causal) for x in (q, k, v_THK))
            out = out.index_copy(0, self.causal, causal_attention(q_C, k_C, v_C, self.starts, self.longest))
        if self.rest is not None:
            out = out.index_copy(0, self.others, self.rest.run(q.index_select(0, self.others), k, v_THK))
        return out

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        assert pointwise is None, "FlashAttention weighs by softmax alone; choose_attention refuses HSTU"
        return self.top.run(q_NHK, k_THK, v_THK)


def plan_varlen(layout: Layout, *, token_budget: int) -> VarlenPlan:
    """Lay out a batch for FlashAttention and FlexAttention; all tensors on the CPU.

    Args:
        layout: The batch's layout, without decay.
        token_budget: Tokens that a batch may hold.
    """
    length = causal_runs(layout)
    within = np.arange(len(layout.lo)) - layout.first_of
    is_causal = within < length[layout.segment_of]
    others = np.flatnonzero(~is_causal)
    some = length[length > 0]
    return VarlenPlan(
        causal=torch.from_numpy(np.flatnonzero(is_causal)),
        starts=torch.from_numpy(np.concatenate([[0], np.cumsum(some)]).astype(np.int32)),
        longest=1 << int(length.max(initial=1) - 1).bit_length(),
        others=torch.from_numpy(others),
        rest=flex_rows(layout, others, token_budget=token_budget) if len(others) else None,
        top=flex_rows(layout, layout.targets, token_budget=token_budget),
    )


def causal_runs(layout: Layout) -> Longs:
    """Return how many tokens from each segment's first on see all that is before them, [S]."""
    token, first = np.arange(len(layout.lo)), layout.first_of
    # an empty interval at the segment's start is the first token's; lo does not matter there
    plain = (layout.hi == token) & ((layout.lo == first) | (token == first))
    broken = np.flatnonzero(~plain)
    ends = layout.segment_starts[1:]
    place = np.searchsorted(broken, layout.segment_starts[:-1])
    breaks = np.append(broken, len(layout.lo))[place]
    found: Longs = np.minimum(breaks, ends) - layout.segment_starts[:-1]
    return found


def causal_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Attend causally inside each run: [C, H, K] three times, to [C, H, K].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        starts: Where each run begins, and the end, [runs + 1] int32.
        longest: Bound on a run's length.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = varlen_attn(q, k, v, starts, starts, longest, longest, **_causal())
    assert isinstance(out, Tensor), "no auxiliary output was asked for"
    return out


@cache
def _causal() -> dict[str, Any]:
    """Return how this torch is told to be causal: by a window, or in older releases by a flag."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
