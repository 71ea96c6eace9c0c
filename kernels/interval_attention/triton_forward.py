"""The forward kernel of interval attention, and the loads that the backward kernels do alike.

Prefixes: `i_` ids, `o_` offsets, `m_` masks, `b_` blocks, `p_` pointers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.interval_attention.triton_scores import (
    NUM_BUCKETS,
    SILU,
    biased,
    matmul,
    sigmoid,
    tile_bounds,
    when_and_where,
)


@triton.jit
def load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row):
    """Return lo, hi and own key of some queries; rows beyond the last see nothing."""
    b_lo = tl.load(lo_ptr + row, mask=m_row, other=0)
    b_hi = tl.load(hi_ptr + row, mask=m_row, other=0)
    return b_lo, b_hi, tl.load(itself_ptr + row, mask=m_row, other=-1)


@triton.jit
def load_rows(ptr, first, o_row, stride, dim, m_row, HEAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return rows first + o_row of a matrix, [rows, BLOCK_K], zero where masked; `first` times the stride is 64 bits."""
    p_block = ptr + tl.cast(first, tl.int64) * stride + o_row[:, None] * stride + dim[None, :]
    if HEAD == BLOCK_K:
        return tl.load(p_block, mask=m_row[:, None], other=0.0)
    return tl.load(p_block, mask=m_row[:, None] & (dim[None, :] < HEAD), other=0.0)


@triton.jit
def store_rows(ptr, value, first, o_row, stride, dim, m_row, HEAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Store what `load_rows` would load, in the pointer's dtype."""
    p_block = ptr + tl.cast(first, tl.int64) * stride + o_row[:, None] * stride + dim[None, :]
    m_block = m_row[:, None]
    if HEAD != BLOCK_K:
        m_block = m_block & (dim[None, :] < HEAD)
    tl.store(p_block, value.to(ptr.dtype.element_ty), mask=m_block)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    lo_ptr,
    hi_ptr,
    itself_ptr,
    query_time_ptr,
    key_time_ptr,
    query_place_ptr,
    key_place_ptr,
    position_bias_ptr,
    time_bias_ptr,
    num_queries,
    num_keys,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    rate,
    value_scale,
    WEIGHTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Mix the values of BLOCK_M queries of one head.

    Softmax, in units of log 2, key tile by key tile (m, l and acc are those of the tiles so far):
        m' = max(m, max s);  p = 2^(s - m');  l' = l 2^(m - m') + sum p;  acc' = acc 2^(m - m') + p v
        out = acc / l;  lse = m + log2 l
    SiLU: out = sum silu(s) v / divisor.
    Grid: (query tiles, heads). out [N, H, K]; lse [H, N] fp32, for softmax alone.
    """
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    first_row = i_m * BLOCK_M
    o_m, o_n, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = first_row + o_m
    m_row = row < num_queries
    b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
    begin, end, inside, outside = tile_bounds(b_lo, b_hi, b_own, m_row, num_keys)
    b_time, b_place = when_and_where(query_time_ptr, query_place_ptr, row, m_row, WEIGHTS)
    b_q = load_rows(q_ptr + i_h * q_head, first_row, o_m, q_row, dim, m_row, HEAD, BLOCK_K)

    k_ptr += i_h * k_head
    v_ptr += i_h * v_head
    if WEIGHTS == SILU:
        position_bias_ptr += i_h * NUM_BUCKETS
        time_bias_ptr += i_h * NUM_BUCKETS
    b_most = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that a tile of which a query sees nothing makes no NaN
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = start + o_n
        m_key = (key >= begin) & (key < end)
        b_k = load_rows(k_ptr, start, o_n, k_row, dim, m_key, HEAD, BLOCK_K)
        b_key_time, b_key_place = when_and_where(key_time_ptr, key_place_ptr, key, m_key, WEIGHTS)
        b_score = matmul(b_q, tl.trans(b_k)) * scale
        apart = b_place[:, None] - b_key_place[None, :]
        ago = b_time[:, None] - b_key_time[None, :]
        b_score = biased(b_score, apart, ago, position_bias_ptr, time_bias_ptr, rate, WEIGHTS)
        edge = (start < inside) | (start + BLOCK_N > outside)
        b_v = load_rows(v_ptr, start, o_n, v_row, dim, m_key, HEAD, BLOCK_K)
        if WEIGHTS == SILU:
            b_sigmoid = sigmoid(b_score)
            if edge:
                m_seen = (key[None, :] >= b_lo[:, None]) & (key[None, :] < b_hi[:, None])
                b_sigmoid = tl.where(m_seen | (key[None, :] == b_own[:, None]), b_sigmoid, 0.0)
            b_weight = b_score * b_sigmoid
        else:
            if edge:
                m_seen = (key[None, :] >= b_lo[:, None]) & (key[None, :] < b_hi[:, None])
                b_score = tl.where(m_seen | (key[None, :] == b_own[:, None]), b_score, float("-inf"))
            b_more = tl.maximum(b_most, tl.max(b_score, axis=1))
            b_weight = tl.exp2(b_score - b_more[:, None])
            b_shrink = tl.exp2(b_most - b_more)
            b_sum = b_sum * b_shrink + tl.sum(b_weight, axis=1)
            b_acc = b_acc * b_shrink[:, None]
            b_most = b_more
        b_acc = matmul(b_weight.to(b_v.dtype), b_v, b_acc)
    if WEIGHTS == SILU:
        b_acc = b_acc * value_scale
    else:
        b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # rows beyond the last
        b_acc = b_acc / b_sum[:, None]
        tl.store(lse_ptr + i_h.to(tl.int64) * num_queries + row, b_most + tl.log2(b_sum), mask=m_row)
    out_row = tl.num_programs(1) * HEAD
    store_rows(out_ptr + i_h * HEAD, b_acc, first_row, o_m, out_row, dim, m_row, HEAD, BLOCK_K)
