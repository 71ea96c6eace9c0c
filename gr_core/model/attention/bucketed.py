"""Attention on a flat batch by plain torch operators: length-bucketed SDPA over segments, on any device.

Only attention is padded: segments are sorted by length into buckets, each padded to its longest segment, which is less
than twice its shortest one. Everything else runs on flat tokens. The kernels' reference is the specification.
What no query of a bucket may see is not computed: history that sees all before it attends causally, without a mask; other
queries attend in pieces, each to the keys between its first and its last one.
Dims: `T` tokens, `N` targets, `P` padded places, `S` segments of a bucket, `Q` queries and `L` keys of one, padded,
`H` heads, `K` head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gr_core.model.attention import flash_cpu
from gr_core.model.attention.plan import AttentionPlan, Layout, Longs, Planner, Pointwise, log_bucket

# Longest over shortest segment of a bucket: 1.35 wastes about 15 % of a bucket and makes about 8 buckets a batch.
_BUCKET_RATIO = 1.35
# Queries of a piece: below it SDPA's CPU kernel takes smaller blocks of keys, which costs more than skipping saves.
_PIECE = 256
# From this length on segments that attend plainly causally have buckets of their own: below, more calls cost more.
_LONG = 128
# Most places over the longest segment's tokens for history and targets to be padded apart.
_SPLIT_WASTE = 1.2


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries next to each other and the keys that some of them may see."""

    queries: tuple[int, int]
    """First padded query and one past the last."""
    keys: tuple[int, int]
    """First padded key and one past the last."""
    mask: Tensor | None
    """[S, 1, queries, keys]: bool, true = attends; with time decay fp32, the score bias, -inf = attends not. None: query
    and key number are compared, causally."""
    distances: Tensor | None
    """Log-bucketed distances in position and in time of query and key, [2, S, queries, keys] uint8."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of like length, padded to one length."""

    num_segments: int
    num_queries: int
    """Padded queries of a segment."""
    num_keys: int
    """Padded keys of a segment."""
    pieces: tuple[Piece, ...]
    """Together all queries, ascending."""


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
        if pointwise is None and v_THK.device.type == "cpu":
            return flash_cpu.attend_all(qk_TGK, v_THK, self)
        q, k = _move(qk_TGK, self.key_pad, self.key_place).chunk(2, dim=1)
        v = _move(v_THK, self.key_pad, self.key_place)
        return _unpad(_run(q, k, v, self.full, pointwise), self.key_place)

    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries; see `AttentionPlan`."""
        if not len(q_NHK):
            return q_NHK
        if pointwise is None and v_THK.device.type == "cpu":
            return flash_cpu.attend_targets(q_NHK, k_THK, v_THK, self)
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
    history = lengths - target_counts
    causal = _causal_segments(layout, history)
    base, query_base, shift = np.zeros((3, len(lengths)), np.int64)
    shapes: list[_Shape] = []
    keys = queries = 0
    for members in _buckets(lengths, causal, one_bucket=one_bucket):
        width, query_width = int(lengths[members].max()), max(int(target_counts[members].max()), 1)
        longest = int(history[members].max())
        split = bool(causal[members].all()) and longest + query_width <= _SPLIT_WASTE * width
        if split:  # all targets lie behind the longest history
            width = longest + query_width
            shift[members] = longest - history[members]
        base[members] = keys + width * np.arange(len(members))
        query_base[members] = queries + query_width * np.arange(len(members))
        shapes.append(_Shape(len(members), width, query_width, keys, queries, longest if split else 0))
        keys, queries = keys + width * len(members), queries + query_width * len(members)
    within[targets] += shift[target_segment]
    key_place, query_place = base[segment_of] + within, query_base[target_segment] + target_within
    key_pad, query_pad = np.zeros(keys, np.int64), np.zeros(queries, np.int64)
    key_pad[key_place], query_pad[query_place] = np.arange(len(within)), np.arange(len(targets))
    full = _places(layout, np.arange(len(within)), within, key_place, keys)
    top = _places(layout, targets, within[targets], query_place, queries)
    return BucketedPlan(
        key_pad=torch.from_numpy(key_pad),
        key_place=torch.from_numpy(key_place),
        query_pad=torch.from_numpy(query_pad),
        query_place=torch.from_numpy(query_place),
        full=tuple(_bucket(full[s.key_rows], full[s.key_rows], s.num_segments, s.causal, layout) for s in shapes),
        top=tuple(_bucket(top[s.query_rows], full[s.key_rows], s.num_segments, 0, layout) for s in shapes),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """A bucket's size and where its padded places begin."""

    num_segments: int
    num_keys: int
    num_targets: int
    first_key: int
    first_query: int
    causal: int
    """First places of a segment that attend plainly causally."""

    @property
    def key_rows(self) -> slice:
        return slice(self.first_key, self.first_key + self.num_segments * self.num_keys)

    @property
    def query_rows(self) -> slice:
        return slice(self.first_query, self.first_query + self.num_segments * self.num_targets)


def bucketed_planner(pack_layout: str) -> Planner:
    """Return the planner for a pack's `pack.layout`: padded pads a batch's segments to one length."""
    return partial(plan_bucketed, one_bucket=pack_layout == "padded")


def _causal_segments(layout: Layout, history: Longs) -> npt.NDArray[np.bool_]:
    """Return which segments are history that sees all history before it, then targets that see history, [S]."""
    if layout.half_life_us is not None or layout.distances:
        return np.zeros(len(history), bool)  # weights depend on more than the mask
    first, segment_of = layout.first_of, layout.segment_of
    itself = np.arange(len(first))
    behind = first + history[segment_of]
    as_history = (itself < behind) & (layout.lo == first) & (layout.hi == itself)
    is_target = np.zeros(len(first), bool)
    is_target[layout.targets] = True
    fits = np.where(is_target, (itself >= behind) & (layout.hi <= behind), as_history)
    plain: npt.NDArray[np.bool_] = np.bincount(segment_of[~fits], minlength=len(history)) == 0
    return plain


def _buckets(lengths: Longs, causal: npt.NDArray[np.bool_], *, one_bucket: bool) -> list[Longs]:
    """Return numbers of segments with tokens by bucket; in one the longest is below `_BUCKET_RATIO` of the shortest."""
    some = np.flatnonzero(lengths)
    if one_bucket or len(some) == 0:
        return [some] if len(some) else []
    lengths, causal = lengths[some], causal[some]
    size = np.floor(np.log(lengths) / np.log(_BUCKET_RATIO))
    kind = 2 * size + (causal & (lengths >= _LONG))
    order = np.lexsort((lengths, kind))
    cuts = np.flatnonzero(np.diff(kind[order])) + 1
    return np.split(some[order], cuts)


_LO, _HI, _ITSELF, _POSITION, _TIME, _REAL = range(6)


def _places(layout: Layout, tokens: Longs, within: Longs, place: Longs, num_places: int) -> Longs:
    """Return lo, hi, itself, position, time and whether there is a token, at every padded place, [P, 6].

    Keys count from the segment's first place. A padded query attends to one key alone, so stays finite.
    """
    start = layout.segment_starts[layout.segment_of[tokens]]
    found = np.zeros((num_places, 6), np.int64)
    found[place, _LO], found[place, _HI] = layout.lo[tokens] - start, layout.hi[tokens] - start
    found[place, _ITSELF], found[place, _REAL] = within, 1
    if layout.position is not None:
        found[place, _POSITION] = layout.position[tokens]
    if layout.time is not None:
        found[place, _TIME] = layout.time[tokens] - layout.time[start]
    return found


def _bucket(queries: Longs, keys: Longs, num_segments: int, causal: int, layout: Layout) -> Bucket:
    """Return the bucket of some padded places: queries [S * Q, 6], keys [S * L, 6], the first `causal` causal."""
    num_queries, num_keys = len(queries) // num_segments, len(keys) // num_segments
    query, key = queries.reshape(num_segments, num_queries, 6), keys.reshape(num_segments, num_keys, 6)
    pieces = [Piece(queries=(0, causal), keys=(0, causal), mask=None, distances=None)] if causal else []
    last = causal
    while last < num_queries:
        left = num_queries - last
        first, last = last, last + (_PIECE if left >= 2 * _PIECE else left)
        pieces.append(_piece(query[:, first:last], key, first, layout))
    return Bucket(num_segments=num_segments, num_queries=num_queries, num_keys=num_keys, pieces=tuple(pieces))


def _piece(query: Longs, key: Longs, first: int, layout: Layout) -> Piece:
    """Return the piece of queries [S, Q, 6], which begin at number `first`, with what they see of keys [S, L, 6]."""
    lo, hi, itself = (query[..., n, None].astype(np.int32) for n in (_LO, _HI, _ITSELF))
    real = query[..., _REAL, None] == 1
    sees = real & (hi > lo)
    least = min(_least(lo, sees), _least(itself, real))
    most = max(_most(hi, sees), _most(itself + 1, real))
    if not real.any():
        least, most = 0, 1
    itself = np.where(real, itself, least)
    number = np.arange(least, most, dtype=np.int32)
    mask = torch.from_numpy(((number >= lo) & (number < hi)) | (number == itself))[:, None]
    distances = None
    if layout.half_life_us is not None or layout.distances:
        query_at, key_at = query[:, :, None], key[:, None, least:most]
        age = np.maximum(query_at[..., _TIME] - key_at[..., _TIME], 0)
        if layout.half_life_us is not None:
            bias = torch.from_numpy((-math.log(2) / layout.half_life_us * age).astype(np.float32))
            mask = bias[:, None].masked_fill_(~mask, -math.inf)
        if layout.distances:
            apart = query_at[..., _POSITION] - key_at[..., _POSITION]
            distances = torch.from_numpy(np.stack([log_bucket(apart), log_bucket(age / 1e6)]))
    return Piece(queries=(first, first + query.shape[1]), keys=(least, most), mask=mask, distances=distances)


def _least(values: npt.NDArray[np.int32], among: npt.NDArray[np.bool_]) -> int:
    return int(np.min(values, where=among, initial=np.iinfo(np.int32).max))


def _most(values: npt.NDArray[np.int32], among: npt.NDArray[np.bool_]) -> int:
    return int(np.max(values, where=among, initial=0))


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
        q_SQHK = q_part.view(bucket.num_segments, bucket.num_queries, heads, dim)
        k_SHLK, v_SHLK = k_part.view(shape_k).transpose(1, 2), v_part.view(shape_k).transpose(1, 2)
        several = torch.split(q_SQHK, [last - first for first, last in (p.queries for p in bucket.pieces)], dim=1)
        outs = []
        for piece, some_SQHK in zip(bucket.pieces, several, strict=True):
            out = _attend(some_SQHK.transpose(1, 2), _keys(k_SHLK, piece), _keys(v_SHLK, piece), piece, pointwise)
            outs.append(out.transpose(1, 2))
        out_SQHK = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        parts.append(out_SQHK.reshape(-1, heads, dim))
    return torch.cat(parts)


def _keys(x_SHLK: Tensor, piece: Piece) -> Tensor:
    first, last = piece.keys
    return x_SHLK if last - first == x_SHLK.shape[2] else x_SHLK[:, :, first:last]


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, pointwise: Pointwise | None) -> Tensor:
    """Return what a piece's queries mix: [S, H, Q, K] and twice [S, H, keys, K] to [S, H, Q, K]."""
    if pointwise is not None:
        return _silu_attention(q, k, v, piece, pointwise)
    if piece.mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = piece.mask if piece.mask.dtype == torch.bool else piece.mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _silu_attention(q: Tensor, k: Tensor, v: Tensor, piece: Piece, pointwise: Pointwise) -> Tensor:
    """Return HSTU's mix of values: [S, H, Q, K] and twice [S, H, keys, K] to [S, H, Q, K]."""
    assert piece.distances is not None and piece.mask is not None, "planned with Layout.distances"  # noqa: PT018
    position, time = piece.distances.int()
    bias = F.embedding(position, pointwise.positions) + F.embedding(time, pointwise.times)
    score = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + bias.permute(0, 3, 1, 2)
    weight = F.silu(score).masked_fill(~piece.mask, 0.0) / pointwise.divisor
    return torch.matmul(weight.to(v.dtype), v)
