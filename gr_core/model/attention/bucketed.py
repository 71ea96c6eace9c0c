"""Attention on a flat batch on the CPU: length-bucketed SDPA over segments.

Only attention is padded: segments are sorted by length into buckets, each padded to its longest segment, which is less
than twice its shortest one. Everything else runs on flat tokens. The kernels' reference is the specification.
Dims: `T` tokens, `N` targets, `P` padded places, `S` segments of a bucket, `L` padded length, `H` heads, `K` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Pointwise

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
    """[S, 1, queries, keys] bool, true = attends."""


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
        return _unpad(_run(q, k, v, self.full), self.key_place)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        k = _move(k_THK, self.key_pad, self.key_place)
        v = _move(v_THK, self.key_pad, self.key_place)
        q = _move(q_NHK, self.query_pad, self.query_place)
        return _unpad(_run(q, k, v, self.top), self.query_place)


def plan_bucketed(layout: Layout, *, one_bucket: bool = False) -> BucketedPlan:
    """Lay out a batch for bucketed attention.

    Args:
        layout: The batch's layout.
        one_bucket: Pad every segment to the batch's longest (pack.layout = padded).

    Returns:
        The plan; all tensors on the CPU.
    """
    segment_starts, lo, hi, targets = layout.segment_starts, layout.lo, layout.hi, layout.targets
    lengths = np.diff(segment_starts)
    segment_of = layout.segment_of
    within = np.arange(segment_starts[-1]) - segment_starts[segment_of]
    target_segment = segment_of[targets]
    target_counts = np.bincount(target_segment, minlength=len(lengths))
    first_target = np.cumsum(target_counts) - target_counts
    target_within = np.arange(len(targets)) - first_target[target_segment]
    start = segment_starts[segment_of]
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
    full = _bounds(keys, key_place, lo - start, hi - start, within)
    top = _bounds(queries, query_place, (lo - start)[targets], (hi - start)[targets], within[targets])
    return BucketedPlan(
        key_pad=torch.from_numpy(key_pad),
        key_place=torch.from_numpy(key_place),
        query_pad=torch.from_numpy(query_pad),
        query_place=torch.from_numpy(query_place),
        full=tuple(_bucket(full[k : k + w * len(m)], len(m), w, w) for m, w, _, k, _ in shapes),
        top=tuple(_bucket(top[q : q + n * len(m)], len(m), n, w) for m, w, n, _, q in shapes),
    )


def _buckets(lengths: Longs, *, one_bucket: bool) -> list[Longs]:
    """Return segment numbers by bucket; within one the longest is less than `_BUCKET_RATIO` of the shortest."""
    if one_bucket or len(lengths) == 0:
        return [np.arange(len(lengths))] if len(lengths) else []
    order = np.argsort(lengths, kind="stable")
    key = np.floor(np.log(np.maximum(lengths[order], 1)) / np.log(_BUCKET_RATIO))
    cuts = np.flatnonzero(np.diff(key)) + 1
    return np.split(order, cuts)


def _bounds(num_places: int, place: Longs, lo: Longs, hi: Longs, itself: Longs) -> npt.NDArray[np.int32]:
    """Return (lo, hi, itself) at every padded place, [P, 3]; a padded query attends to key 0 alone, so stays finite."""
    bounds = np.zeros((num_places, 3), np.int32)
    bounds[place, 0], bounds[place, 1], bounds[place, 2] = lo, hi, itself
    return bounds


def _bucket(bounds: npt.NDArray[np.int32], num_segments: int, num_queries: int, num_keys: int) -> Bucket:
    key = np.arange(num_keys, dtype=np.int32)
    lo, hi, itself = bounds[:, 0, None], bounds[:, 1, None], bounds[:, 2, None]
    mask = ((key >= lo) & (key < hi)) | (key == itself)
    shaped = torch.from_numpy(mask).view(num_segments, 1, num_queries, num_keys)
    return Bucket(num_segments=num_segments, num_queries=num_queries, num_keys=num_keys, mask=shaped)


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


def _run(q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...]) -> Tensor:
    heads, dim = q.shape[1:]
    # split, not slices: its backward is one concatenation, a slice's is a full tensor of zeros each
    queries = torch.split(q, [b.num_segments * b.num_queries for b in buckets])
    num_keys = [b.num_segments * b.num_keys for b in buckets]
    parts = []
    for bucket, q_part, k_part, v_part in zip(
        buckets, queries, torch.split(k, num_keys), torch.split(v, num_keys), strict=True
    ):
        shape_k = (bucket.num_segments, bucket.num_keys, heads, dim)
        out = F.scaled_dot_product_attention(
            q_part.view(bucket.num_segments, bucket.num_queries, heads, dim).transpose(1, 2),
            k_part.view(shape_k).transpose(1, 2),
            v_part.view(shape_k).transpose(1, 2),
            attn_mask=bucket.mask,
        )
        parts.append(out.transpose(1, 2).reshape(-1, heads, dim))
    return torch.cat(parts)
