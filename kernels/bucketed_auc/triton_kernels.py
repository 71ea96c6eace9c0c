"""The kernels of bucketed AUC: scores to cells and sums, counted in shared memory or in copies of the histogram in L2.

Of a known, supervised score x with label y, in fp32:

    bin          floor(x * scale) - low * scale, clamped to [0, B), with scale = B / (high - low)
    loss         max(y ? -x : x, 0) + log1p(exp(-|x|))
    probability  (x >= 0 ? 1 : exp(-|x|)) / (1 + exp(-|x|))

A NaN falls into no bin and is not counted, but makes its action's two sums NaN. What is masked out becomes x = -inf, y = 0,
whose loss and probability are exactly 0, so it does not matter what lies there.

Skewed scores are the usual case (a night starts from nearly equal ones, and clicks are rare), and one global histogram
would take one atomic a score at one address, of which L2 does about one a clock. Instead:

- `shared_kernel`, for one cohort: tl.histogram, whose atomics in shared memory the compiler makes ATOMS.POPC.INC, which
  adds a warp's lanes at one address at once, so that equal scores are its fastest case. A program keeps its counts in
  registers, 16 bits a label, and adds them to the int64 histogram once, in a coalesced sweep of the cells that are not
  empty. The 2 * B cells of an action take 64 KiB at B = 8192, so a program counts one or two actions, and the programs of
  other actions read the same rows from L2.
- `scatter_kernel`, for several cohorts, and where Triton makes tl.histogram of ballots (before 3.8), which takes O(B) a
  score and thousands of registers: one L2 atomic a score into one of many copies of the histogram, by block, so equal
  scores meet at as many addresses as there are copies. `merge_kernel` adds the copies up and empties them.

Sums do not depend on who is first: a block's loss and probability are written down, and added in the order of the blocks
by the last program of an action to finish (a ticket counter tells) or by `merge_kernel`. Counts are integers, also those
in fp64, so the order of their atomics does not matter.

Dims: `R` rows of a block, `A` actions (padded to a power of two), `B` bins, `S` cells.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton gives kernels' parameters their types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _terms(x, y):
    """Return loss and probability of logits, fp32.

    log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3: log(1 + e) would lose a small e. The polynomial is atanh(s) / s in s * s,
    fitted by reweighted least squares, off by 4e-9; one reciprocal serves both quotients.
    """
    e = tl.exp(-tl.abs(x))
    r = 1.0 / ((1.0 + e) * (2.0 + e))
    s = e * (1.0 + e) * r
    z = s * s
    series = (((0.14095734 * z + 0.13978842) * z + 0.20012557) * z + 0.33333155) * z + 1.0
    loss = tl.maximum(tl.where(y, -x, x), 0.0) + 2.0 * s * series
    return loss, tl.where(x >= 0, 1.0, e) * ((2.0 + e) * r)


@triton.jit
def _bins(x, LOW: tl.constexpr, SCALE: tl.constexpr, B: tl.constexpr):
    """Return bins of logits, int32, and whether they were clipped; exact, since SCALE is a power of two."""
    first: tl.constexpr = LOW * SCALE
    offset: tl.constexpr = int(LOW * SCALE)
    place = x * SCALE
    far = (place < first) | (place >= first + B)
    near = tl.minimum(tl.maximum(place, first), first + (B - 0.5))
    return tl.floor(near).to(tl.int32) - offset, far


@triton.jit
def _count_block(
    partials,
    clipped,
    logits,
    labels,
    known,
    supervise,
    num_rows,
    num_blocks,
    i_block,
    a,
    SUPERVISED: tl.constexpr,
    LOGIT_ROW: tl.constexpr,
    LABEL_ROW: tl.constexpr,
    KNOWN_ROW: tl.constexpr,
    LOW: tl.constexpr,
    SCALE: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the block's counts of an action by bin, negatives in the lower and positives in the upper 16 bits, [B]."""
    row = i_block.to(tl.int64) * BLOCK
    num_left = num_rows - row
    r_R = tl.arange(0, BLOCK)
    wide_R = r_R.to(tl.int64)  # so that a thread's addresses are one register and constants
    o_known, o_label, o_logit = wide_R * KNOWN_ROW, wide_R * LABEL_ROW, wide_R * LOGIT_ROW
    known += row * KNOWN_ROW + a
    labels += row * LABEL_ROW + a
    logits += row * LOGIT_ROW + a
    if num_left >= BLOCK:  # without a mask, loads of one action can be 16 bytes wide
        is_known, label, x = tl.load(known + o_known), tl.load(labels + o_label), tl.load(logits + o_logit)
    else:
        m_R = r_R < num_left
        is_known = tl.load(known + o_known, mask=m_R, other=0)
        label = tl.load(labels + o_label, mask=m_R, other=0)
        x = tl.load(logits + o_logit, mask=m_R, other=0.0)
    m = is_known != 0
    if SUPERVISED:
        m = m & (tl.load(supervise + row + r_R, mask=r_R < num_left, other=0) != 0)
    y = m & (label != 0)
    x = tl.where(m, x.to(tl.float32), float("-inf"))
    loss, probability = _terms(x, y)
    o_loss = a.to(tl.int64) * 2 * num_blocks + i_block
    tl.store(partials + o_loss, tl.sum(loss, axis=0))
    tl.store(partials + o_loss + num_blocks, tl.sum(probability, axis=0))
    bins, far = _bins(x, LOW, SCALE, B)
    num_far = tl.sum((m & far).to(tl.int32), axis=0)
    tl.atomic_add(clipped + a, num_far.to(tl.int64), mask=num_far > 0, sem="relaxed")
    found = tl.histogram(bins + tl.where(y, B, 0), 2 * B, mask=m & (x == x))
    weight = tl.where(tl.arange(0, 2) == 0, 1, 65536)
    return tl.sum(tl.reshape(found, [2, B]) * weight[:, None], axis=0)


@triton.jit
def _add_counts(positives, negatives, sums, counts_B, a, B: tl.constexpr):
    """Add a program's packed counts of an action to the totals."""
    o_B = a.to(tl.int64) * B + tl.arange(0, B)
    negatives_B, positives_B = counts_B & 0xFFFF, (counts_B >> 16) & 0xFFFF
    tl.atomic_add(negatives + o_B, negatives_B.to(tl.int64), mask=negatives_B != 0, sem="relaxed")
    tl.atomic_add(positives + o_B, positives_B.to(tl.int64), mask=positives_B != 0, sem="relaxed")
    num_positives = tl.sum(positives_B, axis=0)
    num_rows = num_positives + tl.sum(negatives_B, axis=0)
    tl.atomic_add(sums + a * 4 + 2, num_positives.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + a * 4 + 3, num_rows.to(tl.float64), sem="relaxed")


@triton.jit
def _add_partials(sums, partials, num_blocks, a, WIDE: tl.constexpr):
    """Add the loss and probability of an action's blocks to the totals, in their order; one program an action may."""
    o_loss = a.to(tl.int64) * 2 * num_blocks
    loss_W, probability_W = tl.zeros([WIDE], tl.float64), tl.zeros([WIDE], tl.float64)
    for first in range(0, num_blocks, WIDE):
        i_W = first + tl.arange(0, WIDE)
        m_W = i_W < num_blocks
        # .cg: other programs wrote these, so L1 must not answer
        loss_W += tl.load(partials + o_loss + i_W, mask=m_W, other=0.0, cache_modifier=".cg")
        probability_W += tl.load(partials + o_loss + num_blocks + i_W, mask=m_W, other=0.0, cache_modifier=".cg")
    tl.store(sums + a * 4, tl.load(sums + a * 4) + tl.sum(loss_W, axis=0))
    tl.store(sums + a * 4 + 1, tl.load(sums + a * 4 + 1) + tl.sum(probability_W, axis=0))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "blocks_a_program"])
def shared_kernel(
    positives,
    negatives,
    clipped,
    sums,
    tickets,
    partials,
    logits,
    labels,
    known,
    supervise,
    num_rows,
    num_blocks,
    blocks_a_program,
    SUPERVISED: tl.constexpr,
    A: tl.constexpr,
    LOGIT_ROW: tl.constexpr,
    LABEL_ROW: tl.constexpr,
    KNOWN_ROW: tl.constexpr,
    LOW: tl.constexpr,
    SCALE: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count an action in up to 65,535 rows a program; grid (programs * A), the programs of the same rows together."""
    a, i_program = tl.program_id(0) % A, tl.program_id(0) // A
    counts_B = tl.zeros([B], tl.int32)
    first_block = i_program * blocks_a_program
    for i in range(tl.minimum(blocks_a_program, num_blocks - first_block)):
        i_block = first_block + i
        counts_B += _count_block(
            partials, clipped, logits, labels, known, supervise, num_rows, num_blocks, i_block, a, SUPERVISED,
            LOGIT_ROW, LABEL_ROW, KNOWN_ROW, LOW, SCALE, B, BLOCK,
        )  # fmt: skip
    _add_counts(positives, negatives, sums, counts_B, a, B)
    tl.debug_barrier()  # all of this program's partial sums are written before its ticket is drawn
    if tl.atomic_add(tickets + a, 1, sem="acq_rel") == tl.num_programs(0) // A - 1:
        _add_partials(sums, partials, num_blocks, a, 1024)
        tl.store(tickets + a, 0)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_copies", "num_cohorts"])
def scatter_kernel(
    copies,
    clipped,
    partials,
    logits,
    labels,
    known,
    supervise,
    cohort,
    num_rows,
    num_blocks,
    num_copies,
    num_cohorts,
    SUPERVISED: tl.constexpr,
    COHORTS: tl.constexpr,
    A: tl.constexpr,
    WIDE_A: tl.constexpr,
    LOGIT_ROW: tl.constexpr,
    LABEL_ROW: tl.constexpr,
    KNOWN_ROW: tl.constexpr,
    LOW: tl.constexpr,
    SCALE: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Count ROWS rows of all actions into copy i % num_copies, [cohort, action, label, bin] int32; grid (num_blocks)."""
    i_block = tl.program_id(0)
    row_R = i_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a_A = tl.arange(0, WIDE_A)
    m_R, m_A = row_R < num_rows, a_A < A
    m_RA = m_R[:, None] & m_A[None, :]
    m = m_RA & (tl.load(known + row_R[:, None] * KNOWN_ROW + a_A[None, :], mask=m_RA, other=0) != 0)
    y = tl.load(labels + row_R[:, None] * LABEL_ROW + a_A[None, :], mask=m_RA, other=0)
    x = tl.load(logits + row_R[:, None] * LOGIT_ROW + a_A[None, :], mask=m_RA, other=0.0).to(tl.float32)
    if SUPERVISED:
        m = m & (tl.load(supervise + row_R, mask=m_R, other=0) != 0)[:, None]
    cohort_R = tl.zeros([ROWS], tl.int32)
    if COHORTS:
        cohort_R = tl.load(cohort + row_R, mask=m_R, other=-1)
        m = m & ((cohort_R >= 0) & (cohort_R < num_cohorts))[:, None]
    y = m & (y != 0)
    x = tl.where(m, x, float("-inf"))
    bins, far = _bins(x, LOW, SCALE, B)
    num_cells = num_cohorts.to(tl.int64) * (A * 2 * B)
    cell = (cohort_R[:, None].to(tl.int64) * A + a_A[None, :]) * (2 * B) + tl.where(y, B, 0) + bins
    tl.atomic_add(copies + (i_block % num_copies) * num_cells + cell, 1, mask=m & (x == x), sem="relaxed")
    loss, probability = _terms(x, y)
    for c in range(num_cohorts):
        mine = m & (cohort_R == c)[:, None]
        o_A = (c * A + a_A).to(tl.int64)
        o_loss = o_A * 2 * num_blocks + i_block
        tl.store(partials + o_loss, tl.sum(tl.where(mine, loss, 0.0), axis=0), mask=m_A)
        tl.store(partials + o_loss + num_blocks, tl.sum(tl.where(mine, probability, 0.0), axis=0), mask=m_A)
        num_far = tl.sum((mine & far).to(tl.int64), axis=0)
        tl.atomic_add(clipped + o_A, num_far, mask=m_A & (num_far > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_blocks", "num_copies", "num_cells"])
def merge_kernel(
    positives,
    negatives,
    sums,
    copies,
    partials,
    num_blocks,
    num_copies,
    num_cells,
    B: tl.constexpr,
    BINS: tl.constexpr,
):
    """Add the copies and the blocks' sums to the totals, and leave the copies empty; grid (num_cells / BINS + C * A)."""
    num_chunks = (num_cells // BINS).to(tl.int32)
    i = tl.program_id(0)
    if i >= num_chunks:
        _add_partials(sums, partials, num_blocks, i - num_chunks, 1024)
    else:
        cell_S = i.to(tl.int64) * BINS + tl.arange(0, BINS)
        counts_S = tl.zeros([BINS], tl.int64)
        for k in range(num_copies):
            o_S = num_cells.to(tl.int64) * k + cell_S
            counts_S += tl.load(copies + o_S).to(tl.int64)
        tl.debug_barrier()  # the stores' layout may be another: no thread empties what another has yet to read
        for k in range(num_copies):
            tl.store(copies + num_cells.to(tl.int64) * k + cell_S, tl.zeros([BINS], tl.int32))
        row = (i * BINS) // (2 * B)  # cohort * A + action
        label = (i * BINS) // B % 2
        o_S = row.to(tl.int64) * B + cell_S % B
        total = tl.sum(counts_S, axis=0).to(tl.float64)
        tl.atomic_add(sums + row * 4 + 3, total, sem="relaxed")
        if label == 1:
            tl.store(positives + o_S, tl.load(positives + o_S) + counts_S)
            tl.atomic_add(sums + row * 4 + 2, total, sem="relaxed")
        else:
            tl.store(negatives + o_S, tl.load(negatives + o_S) + counts_S)
