"""What the interval attention kernels share: who sees whom, scores with their biases, and buckets of distances.

Prefixes: `i_` ids, `b_` blocks, `m_` masks. Shapes of a block: [queries, keys], or turned.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl

from kernels import choice

SOFTMAX = tl.constexpr(0)
"""Weights exp2(score - lse): the score is in units of log 2."""
DECAY = tl.constexpr(1)
"""The same, minus the key's age in half-lives."""
SILU = tl.constexpr(2)
"""Weights silu(score + position bias + time bias), HSTU's."""
NUM_BUCKETS = tl.constexpr(64)
"""Buckets of a distance, half an octave each."""

_INTERPRETED = tl.constexpr(choice.INTERPRETED)

# 1e-6 and four units in its last place: a whole number of seconds is never below itself, so 1, 3, 7, ... s, where buckets
# begin, are in the bucket that they begin; one microsecond below they are not.
_SECONDS = tl.constexpr(1.0000000000000008e-06)


@triton.jit
def matmul(b_left, b_right, b_acc=None):
    """Return the product, added to b_acc, in fp32: fp32 operands are not rounded to tf32."""
    if _INTERPRETED:  # which would multiply bf16's bits as integers
        b_left = b_left.to(tl.float32)
        b_right = b_right.to(tl.float32)
    return tl.dot(b_left, b_right, b_acc, input_precision="ieee")


@triton.jit
def position_bucket(distance):
    """Return the bucket of a distance in tokens, int32: floor(2 log2(1 + d)) = the exponent of (1 + d)^2."""
    far = tl.maximum(distance, 0).to(tl.float32) + 1.0
    exponent = ((far * far).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(exponent, NUM_BUCKETS - 1)


@triton.jit
def time_bucket(distance):
    """Return the bucket of a distance in microseconds, held in fp64: floor(2 log2(1 + seconds))."""
    far = tl.maximum(distance, 0.0) * _SECONDS + 1.0
    exponent = ((far * far).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
    return tl.minimum(exponent, NUM_BUCKETS - 1)


@triton.jit
def when_and_where(time_ptr, place_ptr, row, m_row, WEIGHTS: tl.constexpr):
    """Return times and positions of some rows; what the weights do not depend on is the row number, and not used."""
    b_time = row
    b_place = row
    if WEIGHTS == DECAY:
        b_time = tl.load(time_ptr + row, mask=m_row, other=0)
    if WEIGHTS == SILU:
        b_time = tl.load(time_ptr + row, mask=m_row, other=0).to(tl.float64)  # exact to the year 2255
        b_place = tl.load(place_ptr + row, mask=m_row, other=0)
    return b_time, b_place


@triton.jit
def biased(b_score, apart, ago, position_bias_ptr, time_bias_ptr, rate, WEIGHTS: tl.constexpr):
    """Return scaled scores with their bias.

    Args:
        b_score: q . k, scaled.
        apart: Query's position minus key's, of b_score's shape.
        ago: Query's time minus key's.
        position_bias_ptr: The head's biases, [64].
        time_bias_ptr: The head's biases, [64].
        rate: 1 / half-life.
        WEIGHTS: SOFTMAX, DECAY or SILU.
    """
    if WEIGHTS == DECAY:
        b_score -= tl.maximum(ago, 0).to(tl.float32) * rate
    if WEIGHTS == SILU:
        b_score += tl.load(position_bias_ptr + position_bucket(apart)) + tl.load(time_bias_ptr + time_bucket(ago))
    return b_score


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), finite for all finite x."""
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def tile_bounds(b_lo, b_hi, b_own, m_row, num_keys):
    """Return the keys that some row sees, [begin, end), and those that all rows see, [inside, outside).

    An interval between two runs that no row sees counts as seen: its pairs are masked.
    """
    m_some = m_row & (b_hi > b_lo)
    begin = tl.minimum(
        tl.min(tl.where(m_some, b_lo, num_keys), axis=0), tl.min(tl.where(m_row, b_own, num_keys), axis=0)
    )
    end = tl.maximum(tl.max(tl.where(m_some, b_hi, 0), axis=0), tl.max(tl.where(m_row, b_own + 1, 0), axis=0))
    inside = tl.max(tl.where(m_row, b_lo, 0), axis=0)
    outside = tl.min(tl.where(m_row, b_hi, num_keys), axis=0)
    return tl.maximum(begin, 0), tl.minimum(end, num_keys), inside, outside
