"""Which queries may see a tile of keys: the inverse of the intervals, for the gradients of keys and values.

Two small kernels before the backward: bounds of each grain of queries, then for each grain of keys the first and the last
query grain whose bounds meet it. Queries lie in the order of their segments, so between these two nearly all do; a pair
that is not seen is masked. A list of the tiles, as FlexAttention has it, would take memory by query tiles times key tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.interval_attention.triton_forward import load_intervals
from kernels.interval_attention.triton_scores import tile_bounds


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def bounds_kernel(lo_ptr, hi_ptr, itself_ptr, bounds_ptr, num_queries, num_keys, GRAIN: tl.constexpr):
    """Bounds of a grain of queries; see `tile_bounds`. Grid: (query grains,). bounds [4, query grains] int32."""
    i_m = tl.program_id(0)
    row = i_m * GRAIN + tl.arange(0, GRAIN)
    m_row = row < num_queries
    b_lo, b_hi, b_own = load_intervals(lo_ptr, hi_ptr, itself_ptr, row, m_row)
    begin, end, inside, outside = tile_bounds(b_lo, b_hi, b_own, m_row, num_keys)
    grains = tl.num_programs(0)
    tl.store(bounds_ptr + i_m, begin)
    tl.store(bounds_ptr + grains + i_m, end)
    tl.store(bounds_ptr + 2 * grains + i_m, inside)
    # a grain cut short by the last query is never whole
    tl.store(bounds_ptr + 3 * grains + i_m, tl.where((i_m + 1) * GRAIN <= num_queries, outside, 0))


@triton.jit(do_not_specialize=["num_queries", "query_grains"])
def reach_kernel(bounds_ptr, reach_ptr, num_queries, query_grains, GRAIN: tl.constexpr, CHUNK: tl.constexpr):
    """First and one past the last query that may see a grain of keys. Grid: (key grains,). reach [2, key grains] int32."""
    i_n = tl.program_id(0)
    first_key = i_n * GRAIN
    b_first = tl.full([CHUNK], 2147483647, tl.int32)
    b_last = tl.full([CHUNK], -1, tl.int32)
    for start in range(0, query_grains, CHUNK):
        grain = start + tl.arange(0, CHUNK)
        m_grain = grain < query_grains
        b_begin = tl.load(bounds_ptr + grain, mask=m_grain, other=0)
        b_end = tl.load(bounds_ptr + query_grains + grain, mask=m_grain, other=0)
        m_meets = (b_begin < first_key + GRAIN) & (b_end > first_key)
        b_first = tl.minimum(b_first, tl.where(m_meets, grain, 2147483647))
        b_last = tl.maximum(b_last, tl.where(m_meets, grain, -1))
    last = tl.max(b_last, axis=0)
    tl.store(reach_ptr + i_n, tl.where(last < 0, 0, tl.min(b_first, axis=0) * GRAIN))
    tl.store(reach_ptr + tl.num_programs(0) + i_n, tl.minimum((last + 1) * GRAIN, num_queries))
