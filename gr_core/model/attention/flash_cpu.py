"""Bucketed softmax attention on the CPU with one backward for all pieces.

SDPA's CPU kernel is called piece by piece, as autograd would; what autograd does between the calls (cut, fill with zeros,
concatenate, add) costs as much memory traffic as attention over short segments, so gradients are written in place here.
Dims: `T` tokens, `N` targets, `P` padded places, `S` segments of a bucket, `Q` queries and `L` keys of one, `H` heads,
`K` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gr_core.model.attention.bucketed import Bucket, BucketedPlan

# As F.scaled_dot_product_attention calls them; it keeps no gradient function that takes a place to write to.
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_all(qk_TGK: Tensor, v_THK: Tensor, plan: BucketedPlan) -> Tensor:
    """Attend with every token as a query, [T, 2 H, K] and [T, H, K] to [T, H, K]; see `AttentionPlan.attend`."""
    mixed: Tensor = _All.apply(qk_TGK, v_THK, plan)  # type: ignore[no-untyped-call]
    return mixed


def attend_targets(q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, plan: BucketedPlan) -> Tensor:
    """Attend with targets as queries; see `AttentionPlan.attend_targets`."""
    mixed: Tensor = _Targets.apply(q_NHK, k_THK, v_THK, plan)  # type: ignore[no-untyped-call]
    return mixed


class _All(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qk: Tensor, v: Tensor, plan: BucketedPlan) -> Tensor:
        qk_pad, v_pad = qk.index_select(0, plan.key_pad), v.index_select(0, plan.key_pad)
        q_pad, k_pad = torch.chunk(qk_pad, 2, dim=1)
        out, saved = _forward(plan.full, q_pad, k_pad, v_pad)
        ctx.save_for_backward(qk_pad, v_pad, *saved)
        ctx.plan = plan
        return out.index_select(0, plan.key_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        qk_pad, v_pad, *saved = ctx.saved_tensors
        place = ctx.plan.key_place
        to_qk, to_v = torch.empty_like(qk_pad), torch.empty_like(v_pad)
        grad = v_pad.new_zeros(v_pad.shape).index_copy_(0, place, grads[0])
        inputs, to = (*torch.chunk(qk_pad, 2, dim=1), v_pad), (*torch.chunk(to_qk, 2, dim=1), to_v)
        _backward(ctx.plan.full, inputs, grad, saved, to)
        return to_qk.index_select(0, place), to_v.index_select(0, place), None


class _Targets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BucketedPlan) -> Tensor:
        q_pad = q.index_select(0, plan.query_pad)
        k_pad, v_pad = k.index_select(0, plan.key_pad), v.index_select(0, plan.key_pad)
        out, saved = _forward(plan.top, q_pad, k_pad, v_pad)
        ctx.save_for_backward(q_pad, k_pad, v_pad, *saved)
        ctx.plan = plan
        return out.index_select(0, plan.query_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_pad, k_pad, v_pad, *saved = ctx.saved_tensors
        query_place, key_place = ctx.plan.query_place, ctx.plan.key_place
        to_q, to_k, to_v = torch.empty_like(q_pad), torch.empty_like(k_pad), torch.empty_like(v_pad)
        grad = torch.zeros_like(q_pad).index_copy_(0, query_place, grads[0])
        _backward(ctx.plan.top, (q_pad, k_pad, v_pad), grad, saved, (to_q, to_k, to_v))
        of_keys = to_k.index_select(0, key_place), to_v.index_select(0, key_place)
        return to_q.index_select(0, query_place), *of_keys, None


def _forward(buckets: tuple[Bucket, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return what padded queries mix, [P, H, K], and of every piece its output and log-sum-exp."""
    mixed = q.new_empty(q.shape)
    saved = []
    for bucket, (queries, to_out), (keys, values) in _views(buckets, (q, mixed), (k, v)):
        for piece in bucket.pieces:
            mine, to = _cut((queries, to_out), piece.queries)
            key, value = _cut((keys, values), piece.keys)
            bias = _score_bias(piece.mask, q.dtype)
            out, logsumexp = _FORWARD(mine, key, value, 0.0, piece.mask is None, attn_mask=bias)
            to.copy_(out)
            saved += [out, logsumexp]
    return mixed, saved


def _backward(
    buckets: tuple[Bucket, ...], inputs: tuple[Tensor, ...], grad: Tensor, saved: list[Tensor], to: tuple[Tensor, ...]
) -> None:
    """Write the gradients of padded queries, keys and values into `to`."""
    (q, k, v), (to_q, to_k, to_v) = inputs, to
    number = 0
    for bucket, of_queries, of_keys in _views(buckets, (q, grad, to_q), (k, v, to_k, to_v)):
        keys, values, *to_both = of_keys
        # the last piece's keys are most often all keys: then it writes where the others add
        later = len(bucket.pieces) - 1
        if bucket.pieces[later].keys != (0, bucket.num_keys):
            for x in to_both:
                x.zero_()
        for place in range(later, -1, -1):
            piece = bucket.pieces[place]
            mine, given, to_mine = _cut(of_queries, piece.queries)
            key, value = _cut((keys, values), piece.keys)
            out, logsumexp = saved[2 * (number + place) : 2 * (number + place) + 2]
            bias = _score_bias(piece.mask, q.dtype)
            causal = piece.mask is None
            found = _BACKWARD(given, mine, key, value, out, logsumexp, 0.0, causal, attn_mask=bias)
            to_mine.copy_(found[0])
            for x, part in zip(_cut(tuple(to_both), piece.keys), found[1:], strict=True):
                if place == later and piece.keys == (0, bucket.num_keys):
                    x.copy_(part)
                else:
                    x.add_(part)
        number += len(bucket.pieces)


def _views(
    buckets: tuple[Bucket, ...], of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> Iterator[tuple[Bucket, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yield every bucket with its part of what is [P, H, K], as [S, H, Q, K] and [S, H, L, K]."""
    num_queries = [bucket.num_segments * bucket.num_queries for bucket in buckets]
    num_keys = [bucket.num_segments * bucket.num_keys for bucket in buckets]
    queries = [torch.split(x, num_queries) for x in of_queries]
    keys = [torch.split(x, num_keys) for x in of_keys]
    for number, bucket in enumerate(buckets):
        segments = bucket.num_segments
        yield bucket, _by_segment(queries, number, segments), _by_segment(keys, number, segments)


def _by_segment(parts: list[tuple[Tensor, ...]], number: int, num_segments: int) -> tuple[Tensor, ...]:
    return tuple(x[number].view(num_segments, -1, *x[number].shape[1:]).transpose(1, 2) for x in parts)


def _cut(tensors: tuple[Tensor, ...], span: tuple[int, int]) -> tuple[Tensor, ...]:
    first, last = span
    if last - first == tensors[0].shape[2]:
        return tensors
    return tuple(x[:, :, first:last] for x in tensors)


def _score_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what SDPA adds to scores: a bool mask as 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros((), dtype=dtype).where(mask, -math.inf)
