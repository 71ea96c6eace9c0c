"""Interval attention in plain torch: the specification that every faster path is compared with.

Dims: `N` queries, `T` keys, `H` heads, `K` head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def interval_mask(lo_N: Tensor, hi_N: Tensor, itself_N: Tensor, num_keys: int) -> Tensor:
    """Say which keys each query attends to: keys [lo, hi), and the query's own token.

    Args:
        lo_N: First key, [N], int.
        hi_N: One past the last key, [N], int; `lo == hi` leaves only the token itself.
        itself_N: The query's own place among the keys, [N], int.
        num_keys: T.

    Returns:
        [N, T], bool, true = attends.
    """
    key_T = torch.arange(num_keys, device=lo_N.device)
    within_NT = (key_T >= lo_N[:, None]) & (key_T < hi_N[:, None])
    return within_NT | (key_T == itself_N[:, None])


def interval_attention_reference(
    q_NHK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    lo_N: Tensor,
    hi_N: Tensor,
    itself_N: Tensor,
    *,
    bias: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Attention over keys [lo, hi) and the token itself, dense and differentiable.

    Weights are softmax(score + bias), or with a divisor silu(score + bias) / divisor (HSTU, arXiv 2402.17152), where
    score = q . k / sqrt(K).

    Args:
        q_NHK: Queries, [N, H, K]; fp64 stays fp64, everything else is computed in fp32.
        k_THK: Keys, [T, H, K].
        v_THK: Values, [T, H, K].
        lo_N: First key of each query, [N], int.
        hi_N: One past the last key, [N], int.
        itself_N: The query's own place among the keys, [N], int.
        bias: Added to the scores, [N, T] or [H, N, T].
        divisor: Of pointwise weights; None: softmax.

    Returns:
        [N, H, K], in q's dtype.
    """
    inner = torch.float64 if q_NHK.dtype == torch.float64 else torch.float32
    mask_NT = interval_mask(lo_N, hi_N, itself_N, k_THK.shape[0])
    scale = 1.0 / math.sqrt(q_NHK.shape[-1])
    # what nobody sees may be uninitialised memory, and 0 * NaN is NaN
    unseen_T = ~mask_NT.any(dim=0)[:, None, None]
    k_THK, v_THK = k_THK.masked_fill(unseen_T, 0.0), v_THK.masked_fill(unseen_T, 0.0)
    score_HNT = torch.einsum("nhk,thk->hnt", q_NHK.to(inner), k_THK.to(inner)) * scale
    if bias is not None:
        score_HNT = score_HNT + bias.to(inner)
    if divisor is None:
        weight_HNT = score_HNT.masked_fill(~mask_NT, -math.inf).softmax(dim=-1)
    else:
        weight_HNT = F.silu(score_HNT).masked_fill(~mask_NT, 0.0) / divisor
    return torch.einsum("hnt,thk->nhk", weight_HNT, v_THK.to(inner)).to(q_NHK.dtype)
