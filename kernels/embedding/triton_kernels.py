"""Triton kernels of the embedding tables; what launches them is in triton_op.

Lookup: out[b] = sum over f of weight[row(b, f)]; backward: grad[r] = sum over (b, f) with row(b, f) = r of out's gradient[b].
Entries are the ids feature by feature, e = f * B + b; stably sorted by row they form runs of equal rows, and each run is
added in this order by one lane. What a run has beyond CHUNK entries is added CHUNK by CHUNK in programs of its own, and
these sums one after another in a last one, so that a hot row does not hold up the device.

Windows: cut the sorted entries into windows of CHUNK. A long run's pieces after its first begin CHUNK apart, each behind a
full piece of the same run, so at most one begins in any window, and a run's pieces have windows in a row: the window is
the piece's place in the scratch buffer, without counting pieces.
Names: i_ ids, m_ masks; e entries, u runs, b bags, f features, d columns. Addresses of rows are int64: a table may have
more than 2^31 numbers. Entries and runs are counted in int32, which leaves room for MOST_ENTRIES and a block behind them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.embedding.layout import PAD_ROW as _PAD_ROW

PAD_ROW = tl.constexpr(_PAD_ROW)
MOST_ENTRIES = 2**31 - 2**16
DENSE = tl.constexpr(0)
"""Write a run's sum to its row of a tensor of all rows."""
MERGED = tl.constexpr(1)
"""Write the runs' sums one after another, and their rows."""
UPDATE = tl.constexpr(2)
"""Move a run's row along its sum by rowwise Adagrad."""


@triton.jit
def _flat_row(local, m, i_f, tables, fallback_of, HAS_TABLES: tl.constexpr):
    """Return the flat row of feature i_f's ids and whether there is one; without tables an id is a flat row."""
    if HAS_TABLES:
        first = tl.load(tables + i_f * 4)
        known = tl.load(tables + i_f * 4 + 1)
        named = tl.load(tables + i_f * 4 + 2)
        begin = tl.load(tables + i_f * 4 + 3)
        m_beyond = m & (local >= known)
        place = begin + tl.minimum(local, named - 1)
        fallback = tl.load(fallback_of + place, mask=m_beyond, other=0)
        local = tl.where(m_beyond, fallback, local)
        return first + local, m & (local > PAD_ROW)
    return local, m & (local >= 0)


@triton.jit(do_not_specialize=["num_bags", "num_features"])
def lookup_kernel(
    weight,
    ids,
    tables,
    fallback_of,
    out,
    num_bags,
    num_features,
    WIDTH: tl.constexpr,
    CONCATENATE: tl.constexpr,
    HAS_TABLES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the rows of BLOCK_B bags in fp32, or lay them side by side. Ids [B, F], out [B, D] or [B, F * D]."""
    i_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    i_d = tl.arange(0, BLOCK_D)
    m_b, m_d = i_b < num_bags, i_d < WIDTH
    total = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    for i_f in range(num_features):
        local = tl.load(ids + i_b * num_features + i_f, mask=m_b, other=0).to(tl.int64)
        row, m_row = _flat_row(local, m_b, i_f, tables, fallback_of, HAS_TABLES)
        m = m_row[:, None] & m_d[None, :]
        value = tl.load(weight + row[:, None] * WIDTH + i_d[None, :], mask=m, other=0.0)
        if CONCATENATE:
            place = (i_b[:, None] * num_features + i_f) * WIDTH + i_d[None, :]
            tl.store(out + place, value.to(out.dtype.element_ty), mask=m_b[:, None] & m_d[None, :])
        else:
            total += value.to(tl.float32)
    if not CONCATENATE:
        place = i_b[:, None] * WIDTH + i_d[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=m_b[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["num_bags", "num_features", "num_entries", "num_rows"])
def keys_kernel(
    ids,
    tables,
    fallback_of,
    keys,
    num_bags,
    num_features,
    num_entries,
    num_rows,
    HAS_TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the flat row of each entry; num_rows, which sorts last, for an absent one. Ids [B, F], keys [F * B]."""
    i_e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_e = i_e < num_entries
    i_f, i_b = i_e // num_bags, i_e % num_bags
    local = tl.load(ids + i_b * num_features + i_f, mask=m_e, other=0).to(tl.int64)
    row, m_row = _flat_row(local, m_e, i_f, tables, fallback_of, HAS_TABLES)
    tl.store(keys + i_e, tl.where(m_row, row, num_rows).to(keys.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize=["num_entries", "num_rows"])
def starts_kernel(keys, run, start, count, num_entries, num_rows, BLOCK: tl.constexpr):
    """Write where each run starts, where the last one ends, and how many runs are not of absent entries.

    Keys [M] sorted, run [M] the number of each entry's run from 1, start [M + 1], count [1].
    """
    i_e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_e = i_e < num_entries
    key = tl.load(keys + i_e, mask=m_e, other=0)
    before = tl.load(keys + i_e - 1, mask=m_e & (i_e > 0), other=0)
    number = tl.load(run + i_e, mask=m_e, other=0)
    tl.store(start + number - 1, i_e, mask=m_e & ((i_e == 0) | (key != before)))
    m_last = i_e == num_entries - 1
    tl.store(start + number, i_e + 1, mask=m_last)
    tl.store(count + i_e * 0, number - (key >= num_rows).to(tl.int32), mask=m_last)


@triton.jit
def _entry_gradients(grad, order, i_e, m_e, i_d, m_d, num_bags, bag_rows, feature_rows, WIDTH: tl.constexpr):
    """Return the gradients that sorted entries stand for, [entries, D] fp32; zero where masked.

    Strides are counted in rows of WIDTH: Triton sees from it that rows are aligned, and loads several numbers at once.
    """
    entry = tl.load(order + i_e, mask=m_e, other=0).to(tl.int32)
    i_b, i_f = (entry % num_bags).to(tl.int64), (entry // num_bags).to(tl.int64)
    place = (i_b * bag_rows + i_f * feature_rows) * WIDTH
    return tl.load(grad + place[:, None] + i_d[None, :], mask=m_e[:, None] & m_d[None, :], other=0.0).to(tl.float32)


@triton.jit
def _rounded(value, row, i_d, seed):
    """Round fp32 [N, D] to bf16 as kernels.embedding.reference.round_stochastically."""
    low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    hashed = ((low * 0x9E3779B1) ^ (high * 0x27D4EB2F))[:, None] + (i_d.to(tl.uint32) * 0x85EBCA77)[None, :]
    hashed += seed.to(tl.uint32) * 0xC2B2AE3D
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    noise = (hashed ^ (hashed >> 16)) >> 16
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + noise) & 0xFFFF0000, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _adagrad(
    weight, accumulator, row, m_row, grad, i_d, m_d, lr, eps, seed, WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Accumulator += mean(grad^2); row -= lr * grad / (sqrt(accumulator) + eps). Rows [N], grad [N, D] zero where masked."""
    state = tl.load(accumulator + row, mask=m_row, other=1.0) + tl.sum(grad * grad, axis=1) / WIDTH
    tl.debug_barrier()  # several warps may hold a row's state: none must read what another has written
    tl.store(accumulator + row, state, mask=m_row)
    m = m_row[:, None] & m_d[None, :]
    place = weight + row[:, None] * WIDTH + i_d[None, :]
    root = tl.broadcast_to((tl.sqrt_rn(state) + eps)[:, None], grad.shape)
    moved = tl.load(place, mask=m, other=0.0).to(tl.float32) - lr * tl.div_rn(grad, root)
    if STOCHASTIC:
        tl.store(place, _rounded(moved, row, i_d, seed), mask=m)
    else:
        tl.store(place, moved.to(weight.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_rows", "seed"])
def adagrad_kernel(
    weight,
    accumulator,
    rows,
    grad,
    num_rows,
    lr,
    eps,
    seed,
    WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move BLOCK_U rows [U] of the weight [R, D] along their gradients [U, D]; formula in `_adagrad`."""
    i_u = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    i_d = tl.arange(0, BLOCK_D)
    m_u, m_d = i_u < num_rows, i_d < WIDTH
    row = tl.load(rows + i_u, mask=m_u, other=0)
    m = m_u[:, None] & m_d[None, :]
    moved = tl.load(grad + i_u[:, None] * WIDTH + i_d[None, :], mask=m, other=0.0).to(tl.float32)
    _adagrad(weight, accumulator, row, m_u, moved, i_d, m_d, lr, eps, seed, WIDTH, STOCHASTIC)


@triton.jit
def _finish(
    out,
    rows,
    accumulator,
    i_u,
    row,
    m_row,
    total,
    i_d,
    m_d,
    lr,
    eps,
    seed,
    MODE: tl.constexpr,
    WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Put the sums [N, D] of runs i_u where MODE says; `out` is the weight where rows are moved."""
    if MODE == UPDATE:
        _adagrad(out, accumulator, row, m_row, total, i_d, m_d, lr, eps, seed, WIDTH, STOCHASTIC)
    else:
        place = row if MODE == DENSE else i_u.to(tl.int64)
        address = out + place[:, None] * WIDTH + i_d[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])
        if MODE == MERGED:
            tl.store(rows + i_u, row, mask=m_row)


@triton.jit(do_not_specialize=["num_bags", "bag_rows", "feature_rows", "num_out", "seed"])
def short_runs_kernel(
    grad,
    order,
    keys,
    start,
    count,
    out,
    rows,
    accumulator,
    num_bags,
    bag_rows,
    feature_rows,
    num_out,
    lr,
    eps,
    seed,
    MODE: tl.constexpr,
    WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up and finish runs of at most CHUNK entries, one a lane; a merged output's rest is zero, its rows -1."""
    i_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    i_d = tl.arange(0, BLOCK_D)
    m_d = i_d < WIDTH
    num_runs = tl.load(count)
    if MODE != MERGED and tl.program_id(0) * BLOCK_U >= num_runs:
        return
    m_u = i_u < num_runs
    begin = tl.load(start + i_u, mask=m_u, other=0)
    length = tl.load(start + i_u + 1, mask=m_u, other=0) - begin
    m_short = m_u & (length <= CHUNK)
    length = tl.where(m_short, length, 0)
    total = tl.zeros([BLOCK_U, BLOCK_D], tl.float32)
    for j in range(tl.max(length, axis=0)):
        total += _entry_gradients(grad, order, begin + j, j < length, i_d, m_d, num_bags, bag_rows, feature_rows, WIDTH)
    row = tl.load(keys + begin, mask=m_short, other=-1).to(tl.int64)
    m_out = m_short | ((i_u >= num_runs) & (i_u < num_out)) if MODE == MERGED else m_short
    _finish(out, rows, accumulator, i_u, row, m_out, total, i_d, m_d, lr, eps, seed, MODE, WIDTH, STOCHASTIC)


@triton.jit
def _window(keys, run, start, num_rows, CHUNK: tl.constexpr):
    """Return this window's run, its first entry and end, and the piece that begins here; it is none where not inside."""
    first = tl.program_id(0) * CHUNK
    i_u = tl.load(run + first) - 1
    begin = tl.load(start + i_u)
    end = tl.load(start + i_u + 1)
    end = tl.where(tl.load(keys + first) < num_rows, end, begin)  # absent entries have no sum
    return i_u, begin, end, begin + tl.cdiv(first - begin, CHUNK) * CHUNK


@triton.jit(do_not_specialize=["num_bags", "bag_rows", "feature_rows", "num_rows"])
def long_pieces_kernel(
    grad,
    order,
    keys,
    run,
    start,
    scratch,
    num_bags,
    bag_rows,
    feature_rows,
    num_rows,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the piece of a long run that begins in this window, unless it is the run's first; scratch [windows, D]."""
    _, begin, end, piece = _window(keys, run, start, num_rows, CHUNK)
    if (piece == begin) | (piece >= end):
        return
    i_d = tl.arange(0, BLOCK_D)
    m_d = i_d < WIDTH
    total = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for offset in range(0, CHUNK, BLOCK_E):
        i_e = piece + offset + tl.arange(0, BLOCK_E)
        total += _entry_gradients(grad, order, i_e, i_e < end, i_d, m_d, num_bags, bag_rows, feature_rows, WIDTH)
    tl.store(scratch + tl.program_id(0).to(tl.int64) * WIDTH + i_d, tl.sum(total, axis=0), mask=m_d)


@triton.jit(do_not_specialize=["num_bags", "bag_rows", "feature_rows", "num_rows", "seed"])
def long_runs_kernel(
    grad,
    order,
    keys,
    run,
    start,
    scratch,
    out,
    rows,
    accumulator,
    num_bags,
    bag_rows,
    feature_rows,
    num_rows,
    lr,
    eps,
    seed,
    MODE: tl.constexpr,
    WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up and finish the long run whose second piece begins in this window: its first piece, then the others' sums."""
    i_u, begin, end, piece = _window(keys, run, start, num_rows, CHUNK)
    if (piece != begin + CHUNK) | (piece >= end):
        return
    i_d = tl.arange(0, BLOCK_D)
    m_d = i_d < WIDTH
    total = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for offset in range(0, CHUNK, BLOCK_E):
        i_e = begin + offset + tl.arange(0, BLOCK_E)
        total += _entry_gradients(grad, order, i_e, i_e < piece, i_d, m_d, num_bags, bag_rows, feature_rows, WIDTH)
    pieces = tl.cdiv(end - piece, CHUNK)
    for offset in range(0, pieces, BLOCK_E):
        i_p = offset + tl.arange(0, BLOCK_E)
        place = scratch + (tl.program_id(0).to(tl.int64) + i_p)[:, None] * WIDTH + i_d[None, :]
        total += tl.load(place, mask=(i_p < pieces)[:, None] & m_d[None, :], other=0.0)
    total = tl.sum(total, axis=0)[None, :]
    i_one = tl.zeros([1], tl.int32)
    row = tl.load(keys + begin + i_one).to(tl.int64)
    _finish(out, rows, accumulator, i_u + i_one, row, row >= 0, total, i_d, m_d, lr, eps, seed, MODE, WIDTH, STOCHASTIC)
