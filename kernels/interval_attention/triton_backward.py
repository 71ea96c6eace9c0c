"""The backward kernels of interval attention: of queries, of keys and values, and of the tables of biases.

Each recomputes the scores from q and k and the softmax from the saved lse. Nothing is added by atomics, so the gradients
are the same from run to run. Prefixes: `i_` ids, `o_` offsets, `m_` masks, `b_` blocks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.interval_attention.triton_forward import load_intervals, load_rows, store_rows
from kernels.interval_attention.triton_scores import (
    NUM_BUCKETS,
    SILU,
    biased,
    matmul,
    position_bucket,
    sigmoid,
    tile_bounds,
    time_bucket,
    when_and_where,
)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
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
    grad_scale,
    WEIGHTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of BLOCK_M queries of one head.

    Softmax: p = 2^(s - lse);  delta = sum_k out * grad;  ds = p (grad . v - delta);  dq = sum ds k / sqrt(K)
    SiLU: sigma = sigmoid(s);  ds = grad . v * sigma (1 + s (1 - sigma)) / divisor;  dq the same.
    Grid: (query tiles, heads). out, grad and grad_q [N, H, K] contiguous; delta [H, N] fp32 is left for
    `key_grad_kernel`.
    """
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    first_row = i_m * BLOCK_M
    o_m, o_n, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = first_row + o_m
    m_row = row < num_queries
    b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
    begin, end, inside, outside = tile_bounds(b_lo, b_hi, b_own, m_row, num_keys)
    b_time, b_place = when_and_where(query_time_ptr, query_place_ptr, row, m_row, WEIGHTS)
    out_row = tl.num_programs(1) * HEAD
    b_q = load_rows(q_ptr + i_h * q_head, first_row, o_m, q_row, dim, m_row, HEAD, BLOCK_K)
    b_grad = load_rows(grad_ptr + i_h * HEAD, first_row, o_m, out_row, dim, m_row, HEAD, BLOCK_K)
    k_ptr += i_h * k_head
    v_ptr += i_h * v_head
    if WEIGHTS == SILU:
        position_bias_ptr += i_h * NUM_BUCKETS
        time_bias_ptr += i_h * NUM_BUCKETS
    else:
        b_out = load_rows(out_ptr + i_h * HEAD, first_row, o_m, out_row, dim, m_row, HEAD, BLOCK_K)
        b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), axis=1)
        o_line = i_h.to(tl.int64) * num_queries + row
        tl.store(delta_ptr + o_line, b_delta, mask=m_row)
        b_lse = tl.load(lse_ptr + o_line, mask=m_row, other=0.0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = start + o_n
        m_key = (key >= begin) & (key < end)
        b_k = load_rows(k_ptr, start, o_n, k_row, dim, m_key, HEAD, BLOCK_K)
        b_v = load_rows(v_ptr, start, o_n, v_row, dim, m_key, HEAD, BLOCK_K)
        b_key_time, b_key_place = when_and_where(key_time_ptr, key_place_ptr, key, m_key, WEIGHTS)
        b_score = matmul(b_q, tl.trans(b_k)) * scale
        apart = b_place[:, None] - b_key_place[None, :]
        ago = b_time[:, None] - b_key_time[None, :]
        b_score = biased(b_score, apart, ago, position_bias_ptr, time_bias_ptr, rate, WEIGHTS)
        b_dot = matmul(b_grad, tl.trans(b_v))
        edge = (start < inside) | (start + BLOCK_N > outside)
        if WEIGHTS == SILU:
            b_slope = sigmoid(b_score)
            b_slope = b_slope * (1.0 + b_score * (1.0 - b_slope))
            if edge:
                m_seen = (key[None, :] >= b_lo[:, None]) & (key[None, :] < b_hi[:, None])
                b_slope = tl.where(m_seen | (key[None, :] == b_own[:, None]), b_slope, 0.0)
            b_dscore = b_dot * b_slope
        else:
            if edge:
                m_seen = (key[None, :] >= b_lo[:, None]) & (key[None, :] < b_hi[:, None])
                b_score = tl.where(m_seen | (key[None, :] == b_own[:, None]), b_score, float("-inf"))
            b_dscore = tl.exp2(b_score - b_lse[:, None]) * (b_dot - b_delta[:, None])
        b_acc = matmul(b_dscore.to(b_k.dtype), b_k, b_acc)
    store_rows(grad_q_ptr + i_h * HEAD, b_acc * grad_scale, first_row, o_m, out_row, dim, m_row, HEAD, BLOCK_K)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_grains"])
def key_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    lo_ptr,
    hi_ptr,
    itself_ptr,
    inside_ptr,
    outside_ptr,
    from_ptr,
    to_ptr,
    query_time_ptr,
    key_time_ptr,
    query_place_ptr,
    key_place_ptr,
    position_bias_ptr,
    time_bias_ptr,
    num_queries,
    num_keys,
    num_grains,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    rate,
    grad_scale,
    value_scale,
    WEIGHTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """Gradients of BLOCK_N keys and values of one head; blocks are turned, [keys, queries].

    Softmax: dv = sum p grad;  dk = sum ds q / sqrt(K), with p and ds of `query_grad_kernel`
    SiLU: dv = sum silu(s) grad / divisor;  dk the same.
    Grid: (key tiles, heads). grad [N, H, K], grad_k and grad_v [T, H, K] contiguous. `inside` and `outside` [query
    grains]: keys that all queries of a grain see; `from` and `to` [key grains]: queries that may see one of a grain.
    """
    i_n, i_h = tl.program_id(0), tl.program_id(1)
    first_key = i_n * BLOCK_N
    o_m, o_n, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    key = first_key + o_n
    m_key = key < num_keys
    out_row = tl.num_programs(1) * HEAD
    b_k = load_rows(k_ptr + i_h * k_head, first_key, o_n, k_row, dim, m_key, HEAD, BLOCK_K)
    b_v = load_rows(v_ptr + i_h * v_head, first_key, o_n, v_row, dim, m_key, HEAD, BLOCK_K)
    b_key_time, b_key_place = when_and_where(key_time_ptr, key_place_ptr, key, m_key, WEIGHTS)
    begin, end = tl.load(from_ptr + first_key // GRAIN), tl.load(to_ptr + first_key // GRAIN)
    for more in tl.static_range(1, BLOCK_N // GRAIN):
        grain = first_key // GRAIN + more
        m_grain = grain < num_grains
        begin = tl.minimum(begin, tl.load(from_ptr + grain, mask=m_grain, other=num_queries))
        end = tl.maximum(end, tl.load(to_ptr + grain, mask=m_grain, other=0))
    q_ptr += i_h * q_head
    grad_ptr += i_h * HEAD
    if WEIGHTS == SILU:
        position_bias_ptr += i_h * NUM_BUCKETS
        time_bias_ptr += i_h * NUM_BUCKETS
    else:
        lse_ptr += i_h.to(tl.int64) * num_queries
        delta_ptr += i_h.to(tl.int64) * num_queries
    b_grad_k = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_grad_v = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(begin, end, BLOCK_M):
        row = start + o_m
        m_row = row < num_queries
        b_q = load_rows(q_ptr, start, o_m, q_row, dim, m_row, HEAD, BLOCK_K)
        b_grad = load_rows(grad_ptr, start, o_m, out_row, dim, m_row, HEAD, BLOCK_K)
        b_time, b_place = when_and_where(query_time_ptr, query_place_ptr, row, m_row, WEIGHTS)
        b_score = matmul(b_k, tl.trans(b_q)) * scale
        apart = b_place[None, :] - b_key_place[:, None]
        ago = b_time[None, :] - b_key_time[:, None]
        b_score = biased(b_score, apart, ago, position_bias_ptr, time_bias_ptr, rate, WEIGHTS)
        edge = (first_key < tl.load(inside_ptr + start // GRAIN)) | (
            first_key + BLOCK_N > tl.load(outside_ptr + start // GRAIN)
        )
        b_dot = matmul(b_v, tl.trans(b_grad))
        if WEIGHTS == SILU:
            b_sigmoid = sigmoid(b_score)
            if edge:
                b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
                m_seen = (key[:, None] >= b_lo[None, :]) & (key[:, None] < b_hi[None, :])
                m_seen = m_seen | (key[:, None] == b_own[None, :])
                b_sigmoid = tl.where(m_seen, b_sigmoid, 0.0)
                b_score = tl.where(m_seen, b_score, 0.0)  # this and b_dot: a NaN that nobody sees, times 0
                b_dot = tl.where(m_seen, b_dot, 0.0)
            b_weight = b_score * b_sigmoid
            b_dscore = b_dot * (b_sigmoid * (1.0 + b_score * (1.0 - b_sigmoid)))
        else:
            if edge:
                b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
                m_seen = (key[:, None] >= b_lo[None, :]) & (key[:, None] < b_hi[None, :])
                m_seen = m_seen | (key[:, None] == b_own[None, :])
                b_score = tl.where(m_seen, b_score, float("-inf"))
                b_dot = tl.where(m_seen, b_dot, 0.0)  # a NaN that nobody sees, times 0
            b_lse = tl.load(lse_ptr + row, mask=m_row, other=0.0)
            b_delta = tl.load(delta_ptr + row, mask=m_row, other=0.0)
            b_weight = tl.exp2(b_score - b_lse[None, :])
            b_dscore = b_weight * (b_dot - b_delta[None, :])
        b_grad_v = matmul(b_weight.to(b_grad.dtype), b_grad, b_grad_v)
        b_grad_k = matmul(b_dscore.to(b_q.dtype), b_q, b_grad_k)
    store_rows(grad_k_ptr + i_h * HEAD, b_grad_k * grad_scale, first_key, o_n, out_row, dim, m_key, HEAD, BLOCK_K)
    store_rows(grad_v_ptr + i_h * HEAD, b_grad_v * value_scale, first_key, o_n, out_row, dim, m_key, HEAD, BLOCK_K)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def bias_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    grad_bias_ptr,
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
    grad_scale,
    WEIGHTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What BLOCK_M queries of one head add to the gradients of both tables of biases.

    d position_bias[b] = sum of ds (of `query_grad_kernel`) over the pairs of bucket b; time_bias the same. A tile of pairs
    has few buckets, so it is summed once for each between its least and its largest.
    Grid: (query tiles, heads). grad_bias [query tiles, heads, 2, 64] fp32: positions, then times; each program's own.
    """
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    first_row = i_m * BLOCK_M
    o_m, o_n, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    slot = tl.arange(0, NUM_BUCKETS)
    row = first_row + o_m
    m_row = row < num_queries
    b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
    begin, end, _inside, _outside = tile_bounds(b_lo, b_hi, b_own, m_row, num_keys)
    b_time, b_place = when_and_where(query_time_ptr, query_place_ptr, row, m_row, WEIGHTS)
    out_row = tl.num_programs(1) * HEAD
    b_q = load_rows(q_ptr + i_h * q_head, first_row, o_m, q_row, dim, m_row, HEAD, BLOCK_K)
    b_grad = load_rows(grad_ptr + i_h * HEAD, first_row, o_m, out_row, dim, m_row, HEAD, BLOCK_K)
    k_ptr += i_h * k_head
    v_ptr += i_h * v_head
    position_bias_ptr += i_h * NUM_BUCKETS
    time_bias_ptr += i_h * NUM_BUCKETS
    b_positions = tl.zeros([NUM_BUCKETS], tl.float32)
    b_times = tl.zeros([NUM_BUCKETS], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = start + o_n
        m_key = (key >= begin) & (key < end)
        b_k = load_rows(k_ptr, start, o_n, k_row, dim, m_key, HEAD, BLOCK_K)
        b_v = load_rows(v_ptr, start, o_n, v_row, dim, m_key, HEAD, BLOCK_K)
        b_key_time, b_key_place = when_and_where(key_time_ptr, key_place_ptr, key, m_key, WEIGHTS)
        b_far = position_bucket(b_place[:, None] - b_key_place[None, :])
        b_ago = time_bucket(b_time[:, None] - b_key_time[None, :])
        b_score = matmul(b_q, tl.trans(b_k)) * scale
        b_score += tl.load(position_bias_ptr + b_far) + tl.load(time_bias_ptr + b_ago)
        b_sigmoid = sigmoid(b_score)
        b_dscore = matmul(b_grad, tl.trans(b_v))
        b_dscore = b_dscore * (b_sigmoid * (1.0 + b_score * (1.0 - b_sigmoid)))
        m_seen = (key[None, :] >= b_lo[:, None]) & (key[None, :] < b_hi[:, None])
        m_seen = m_seen | (key[None, :] == b_own[:, None])
        b_far = tl.where(m_seen, b_far, -1)
        b_ago = tl.where(m_seen, b_ago, -1)
        for bucket in range(tl.min(tl.where(m_seen, b_far, NUM_BUCKETS)), tl.max(b_far) + 1):
            b_positions += tl.where(slot == bucket, tl.sum(tl.where(b_far == bucket, b_dscore, 0.0)), 0.0)
        for bucket in range(tl.min(tl.where(m_seen, b_ago, NUM_BUCKETS)), tl.max(b_ago) + 1):
            b_times += tl.where(slot == bucket, tl.sum(tl.where(b_ago == bucket, b_dscore, 0.0)), 0.0)
    grad_bias_ptr += (i_m.to(tl.int64) * tl.num_programs(1) + i_h) * 2 * NUM_BUCKETS
    tl.store(grad_bias_ptr + slot, b_positions * grad_scale)
    tl.store(grad_bias_ptr + NUM_BUCKETS + slot, b_times * grad_scale)
