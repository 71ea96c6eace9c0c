"""Attention on a flat batch by plain torch operators: length-bucketed SDPA over segments, on any device.

Only attention is padded: segments are sorted by length into buckets, each padded to its longest segment, which is less
than twice its shortest one. Everything else runs on flat tokens. The kernels' reference is the specification.
Dims: `T` tokens, `N` targets, `P` padded places, `S` segments of a bucket, `L` padded length, `H` heads, `K` head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Planner, Pointwise, log_bucket

# Longest over shortest segment of a bucket: 1.35 wastes about 15 % of a bucket and makes about 8 buckets a batch.
_BUCKET_RATIO = 1.35


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of like length, padded to one length."""

    num_segments: int
    num_queries: int
    """Padded queries of a segment."""
    num_keys: int
    """Padded keys of a segment."""
    mask: Tensor
    """[S, 1, queries, keys]: bool, true = attends; with time decay fp32, the score bias, -inf = attends not."""
    distances: Tensor | None
    """Log-bucketed distances in position and in time of query and key, [2, S, queries, keys] uint8."""


@dataclass(frozen=True, slots=True)
class BucketedPlan(AttentionPlan):
    """Where flat tokens lie in the padded buckets, for all tokens as queries and for targets only."""

    kernel: ClassVar[str] = "bucketed"

    key_pad: Tensor
    """Token at each padded key place, [P], int64; 0 where padded."""
    key_place: Tensor
    """Padded place of each token, [T], int64."""
    query_pad: Tensor
    """Target (number among targets) at each padded query place, [Q], int64; 0 where padded."""
    query_place: Tensor
    """Padded query place of each target, [N], int64."""
    full: tuple[Bucket, ...]
    """All tokens attend."""
    top: tuple[Bucket, ...]
    """Only targets attend."""

    @property
    def padding_fraction(self) -> float:
        """Share of padded key places without a token (0-1)."""
        return 1.0 - self.key_place.numel() / max(self.key_pad.numel(), 1)

    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query; see `AttentionPlan`."""
        q, k = _move(qk_TGK, self.key_pad, self.key_place).chunk(2, dim=1)
        v = _move(v_THK, self.key_pad, self.key_place)
        return _unpad(_run(q, k, v, self.full, pointwise), self.key_place)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        k = _move(k_THK, self.key_pad, self.key_place)
        v = _move(v_THK, self.key_pad, self.key_place)
        q = _move(q_NHK, self.query_pad, self.query_place)
        return _unpad(_run(q, k, v, self.top, pointwise), self.query_place)


def plan_bucketed(layout: Layout, *, one_bucket: bool = False) -> BucketedPlan:
    """Lay out a batch for bucketed attention.

    Args:
        layout: The batch's layout.
        one_bucket: Pad every segment to the batch's longest (pack.layout = padded).

    Returns:
        The plan; all tensors on the CPU.
    """
    lengths, targets = np.diff(layout.segment_starts), layout.targets
    segment_of = layout.segment_of
    within = np.arange(len(segment_of)) - layout.segment_starts[segment_of]
    target_segment = segment_of[targets]
    target_counts = np.bincount(target_segment, minlength=len(lengths))
    first_target = np.cumsum(target_counts) - target_counts
    target_within = np.arange(len(targets)) - first_target[target_segment]
    key_place, query_place = np.empty(len(within), np.int64), np.empty(len(targets), np.int64)
    base = np.zeros(len(lengths), np.int64)
    query_base = np.zeros(len(lengths), np.int64)
    shapes: list[tuple[Longs, int, int, int, int]] = []
    keys = queries = 0
    for members in _buckets(lengths, one_bucket=one_bucket):
        width, query_width = int(lengths[members].max()), max(int(target_counts[members].max()), 1)
        base[members] = keys + width * np.arange(len(members))
        query_base[members] = queries + query_width * np.arange(len(members))
        shapes.append((members, width, query_width, keys, queries))
        keys, queries = keys + width * len(members), queries + query_width * len(members)
    key_place[:] = base[segment_of] + within
    query_place[:] = query_base[target_segment] + target_within
    key_pad, query_pad = np.zeros(keys, np.int64), np.zeros(queries, np.int64)
    key_pad[key_place], query_pad[query_place] = np.arange(len(within)), np.arange(len(targets))
    full = _places(layout, np.arange(len(within)), key_place, keys)
    top = _places(layout, targets, query_place, queries)
    return BucketedPlan(
        key_pad=torch.from_numpy(key_pad),
        key_place=torch.from_numpy(key_place),
        query_pad=torch.from_numpy(query_pad),
        query_place=torch.from_numpy(query_place),
        full=tuple(
            _bucket(full[k : k + w * len(m)], full[k : k + w * len(m)], len(m), layout) for m, w, _, k, _ in shapes
        ),
        top=tuple(
            _bucket(top[q : q + n * len(m)], full[k : k + w * len(m)], len(m), layout) for m, w, n, k, q in shapes
        ),
    )


def bucketed_planner(pack_layout: str) -> Planner:
    """Return the planner for a pack's `pack.layout`: padded pads a batch's segments to one length."""
    return partial(plan_bucketed, one_bucket=pack_layout == "padded")


def _buckets(lengths: Longs, *, one_bucket: bool) -> list[Longs]:
    """Return segment numbers by bucket; within one the longest is less than `_BUCKET_RATIO` of the shortest."""
    if one_bucket or len(lengths) == 0:
        return [np.arange(len(lengths))] if len(lengths) else []
    order = np.argsort(lengths, kind="stable")
    key = np.floor(np.log(np.maximum(lengths[order], 1)) / np.log(_BUCKET_RATIO))
    cuts = np.flatnonzero(np.diff(key)) + 1
    return np.split(order, cuts)


_LO, _HI, _ITSELF, _POSITION, _TIME = range(5)


def _places(layout: Layout, tokens: Longs, place: Longs, num_places: int) -> Longs:
    """Return lo, hi, itself, position and time, counted from the segment's first token, at every padded place, [P, 5].

    A padded query attends to key 0 alone, so stays finite.
    """
    start = layout.segment_starts[layout.segment_of[tokens]]
    found = np.zeros((num_places, 5), np.int64)
    found[place, _LO], found[place, _HI] = layout.lo[tokens] - start, layout.hi[tokens] - start
    found[place, _ITSELF] = tokens - start
    if layout.position is not None:
        found[place, _POSITION] = layout.position[tokens]
    if layout.time is not None:
        found[place, _TIME] = layout.time[tokens] - layout.time[start]
    return found


def _bucket(queries: Longs, keys: Longs, num_segments: int, layout: Layout) -> Bucket:
    """Return the bucket of some padded places: queries [S * Q, 5], keys [S * K, 5]."""
    num_queries, num_keys = len(queries) // num_segments, len(keys) // num_segments
    shape = (num_segments, num_queries, num_keys)
    key = np.arange(num_keys, dtype=np.int32)
    lo, hi, itself = (queries[:, n, None].astype(np.int32) for n in (_LO, _HI, _ITSELF))
    mask = torch.from_numpy(((key >= lo) & (key < hi)) | (key == itself)).view(num_segments, 1, num_queries, num_keys)
    distances = None
    if layout.half_life_us is not None or layout.distances:
        query_at, key_at = queries.reshape(*shape[:2], 1, 5), keys.reshape(num_segments, 1, num_keys, 5)
        age = np.maximum(query_at[..., _TIME] - key_at[..., _TIME], 0)
        if layout.half_life_us is not None:
            bias = torch.from_numpy((-math.log(2) / layout.half_life_us * age).astype(np.float32))
            mask = bias[:, None].masked_fill_(~mask, -math.inf)
        if layout.distances:
            apart = query_at[..., _POSITION] - key_at[..., _POSITION]
            distances = torch.from_numpy(np.stack([log_bucket(apart), log_bucket(age / 1e6)]))
    return Bucket(num_segments=num_segments, num_queries=num_queries, num_keys=num_keys, mask=mask, distances=distances)


class _Move(torch.autograd.Function):
    """Copy rows to new places. Backward is the way back, a copy again: padded places are constants without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _Unpad(torch.autograd.Function):
    """Take rows from their padded places. Backward leaves zero at padded places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        grad[place] = grads[0]
        return grad, None


def _move(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = _Move.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved


def _unpad(x: Tensor, place: Tensor) -> Tensor:
    taken: Tensor = _Unpad.apply(x, place)  # type: ignore[no-untyped-call]
    return taken


def _run(q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...], pointwise: Pointwise | None) -> Tensor:
    heads, dim = q.shape[1:]
    # split, not slices: its backward is one concatenation, a slice's is a full tensor of zeros each
    queries = torch.split(q, [b.num_segments * b.num_queries for b in buckets])
    num_keys = [b.num_segments * b.num_keys for b in buckets]
    parts = []
    for bucket, q_part, k_part, v_part in zip(
        buckets, queries, torch.split(k, num_keys), torch.split(v, num_keys), strict=True
    ):
        shape_k = (bucket.num_segments, bucket.num_keys, heads, dim)
        q_SHQK = q_part.view(bucket.num_segments, bucket.num_queries, heads, dim).transpose(1, 2)
        k_SHKK, v_SHKK = k_part.view(shape_k).transpose(1, 2), v_part.view(shape_k).transpose(1, 2)
        if pointwise is None:
            mask = bucket.mask if bucket.mask.dtype == torch.bool else bucket.mask.to(q.dtype)
            out = F.scaled_dot_product_attention(q_SHQK, k_SHKK, v_SHKK, attn_mask=mask)
        else:
            out = _silu_attention(q_SHQK, k_SHKK, v_SHKK, bucket, pointwise)
        parts.append(out.transpose(1, 2).reshape(-1, heads, dim))
    return torch.cat(parts)


def _silu_attention(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, pointwise: Pointwise) -> Tensor:
    """Return HSTU's mix of values: [S, H, Q, K] and twice [S, H, L, K] to [S, H, Q, K]."""
    assert bucket.distances is not None, "planned with Layout.distances"
    position, time = bucket.distances.int()
    bias = F.embedding(position, pointwise.positions) + F.embedding(time, pointwise.times)
    score = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + bias.permute(0, 3, 1, 2)
    weight = F.silu(score).masked_fill(~bucket.mask, 0.0) / pointwise.divisor
    return torch.matmul(weight.to(v.dtype), v)
