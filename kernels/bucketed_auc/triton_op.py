"""Launches the kernels of bucketed AUC; the custom op gr::bucketed_auc, which adds rows to the counts in place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels._triton import Variant
from kernels.bucketed_auc.triton_kernels import merge_kernel, scatter_kernel, shared_kernel

SHARED_ATOMICS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)
"""Whether tl.histogram compiles to atomics in shared memory; 3.6 and 3.7 make ballots, O(bins) a score."""
_SHARED_BINS = (1024, 16_384)
"""Bins for which `shared_kernel` has the registers and the shared memory."""
_SHARED_ACTIONS = 8
"""More of them would read the rows from L2 more often than `scatter_kernel` takes for its atomics."""
_SHARED_BLOCK, _SHARED_WARPS = 8192, 32
_SHARED_BLOCKS = 65_535 // _SHARED_BLOCK
"""Most blocks of a program: it counts in 16 bits."""
_SCATTER_SCORES, _SCATTER_WARPS = 4096, 8
_MERGED_BINS, _MERGE_WARPS = 1024, 4
_COPIES, _COPIES_BYTES = 128, 16 * 2**20
"""Most copies of the histogram: L2 holds them (50 MB on an H100) with room for what streams through."""
_MAX_ROW_STRIDE = 4096
_LOGITS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def new_scratch(num_cohorts: int, num_actions: int, num_bins: int, device: torch.device) -> Tensor:
    """Return what the op needs between calls and leaves as it was: zeros, int32; one for a stream's updates."""
    if _is_shared(num_cohorts, num_actions, num_bins):
        return torch.zeros(num_actions, dtype=torch.int32, device=device)
    num_cells = num_cohorts * num_actions * 2 * num_bins
    copies = max(1, min(_COPIES, _COPIES_BYTES // (4 * num_cells)))
    return torch.zeros(copies * num_cells, dtype=torch.int32, device=device)


@torch.library.custom_op("gr::bucketed_auc", mutates_args=("positives", "negatives", "clipped", "sums", "scratch"))
def bucketed_auc(
    positives: Tensor,
    negatives: Tensor,
    clipped: Tensor,
    sums: Tensor,
    scratch: Tensor,
    logits: Tensor,
    labels: Tensor,
    known: Tensor,
    supervise: Tensor | None,
    cohort: Tensor | None,
    low: float,
    high: float,
) -> None:
    """Add rows to the counts, in place; what is counted is in `kernels.bucketed_auc.triton_kernels`.

    Args:
        positives: [C * A, B] int64, contiguous like all that is changed.
        negatives: [C * A, B] int64.
        clipped: [C * A] int64.
        sums: [C * A, 4] fp64: log loss, probability, positives, rows.
        scratch: As `new_scratch` made it.
        logits: [N, A] fp32 or bf16, any strides.
        labels: [N, A] bool.
        known: [N, A] bool.
        supervise: [N] bool or uint8, or None: all rows.
        cohort: [N] int32, or None: all rows are of cohort 0. Rows of a cohort outside [0, C) count nowhere.
        low: Left edge of the first bin.
        high: Right edge of the last bin.

    Raises:
        ValueError: Logits of another dtype, 2^31 rows or more, or bins that fp32 cannot find exactly.
    """
    num_rows, num_actions = logits.shape
    num_bins = positives.shape[1]
    num_cohorts = len(clipped) // max(1, num_actions)
    if logits.dtype not in _LOGITS:
        raise ValueError(f"logits must be float32 or bfloat16 for the Triton kernel, got {logits.dtype}")
    if num_rows >= 2**31 - _SHARED_BLOCK:
        raise ValueError(f"one update takes fewer than 2^31 rows, got {num_rows}: update with parts of them")
    constants = {"LOW": low, "SCALE": _scale(num_bins, low, high), "B": num_bins, "A": num_actions}
    if num_rows == 0 or num_actions == 0:
        return
    if num_cohorts == 1 and cohort is not None:
        supervise = cohort == 0 if supervise is None else (cohort == 0) & (supervise != 0)
        cohort = None
    read = {}
    for name, values in (("logit", logits), ("label", labels.view(torch.uint8)), ("known", known.view(torch.uint8))):
        read[name], constants[f"{name.upper()}_ROW"] = _rows(values)
    # what is not there is not read: any tensor stands for it
    read["supervise"] = read["known"] if supervise is None else supervise.contiguous().view(torch.uint8)
    constants["SUPERVISED"] = supervise is not None
    totals = {"positives": positives, "negatives": negatives, "clipped": clipped, "sums": sums}
    if _is_shared(num_cohorts, num_actions, num_bins):
        _count_shared(totals, scratch, read, num_rows, constants)
    else:
        _count_scattered(totals, scratch, read, cohort, num_rows, num_cohorts, constants)


@bucketed_auc.register_fake
def _(*_: Any) -> None:
    """Return nothing: the op only changes its first arguments."""


def _count_shared(
    totals: dict[str, Tensor], tickets: Tensor, read: dict[str, Tensor], num_rows: int, constants: dict[str, Any]
) -> None:
    """One launch: the last program of each action adds the sums."""
    num_actions, num_blocks = constants["A"], triton.cdiv(num_rows, _SHARED_BLOCK)
    blocks = max(1, min(_SHARED_BLOCKS, num_blocks * num_actions // _processors(tickets.device)))
    shared_kernel[(triton.cdiv(num_blocks, blocks) * num_actions,)](
        totals["positives"],
        totals["negatives"],
        totals["clipped"],
        totals["sums"],
        tickets,
        torch.empty(num_actions * 2 * num_blocks, dtype=torch.float64, device=tickets.device),
        read["logit"],
        read["label"],
        read["known"],
        read["supervise"],
        num_rows,
        num_blocks,
        blocks,
        **constants,
        BLOCK=_SHARED_BLOCK,
        num_warps=_SHARED_WARPS,
    )


def _count_scattered(
    totals: dict[str, Tensor],
    copies: Tensor,
    read: dict[str, Tensor],
    cohort: Tensor | None,
    num_rows: int,
    num_cohorts: int,
    constants: dict[str, Any],
) -> None:
    """Two launches: count into copies, then merge those that were used."""
    num_actions, num_bins = constants["A"], constants["B"]
    rows, wide = _tile(num_actions)
    num_blocks, num_cells = triton.cdiv(num_rows, rows), num_cohorts * num_actions * 2 * num_bins
    num_copies = min(num_blocks, len(copies) // num_cells)
    partials = torch.empty(num_cohorts * num_actions * 2 * num_blocks, dtype=torch.float64, device=copies.device)
    scatter_kernel[(num_blocks,)](
        copies,
        totals["clipped"],
        partials,
        read["logit"],
        read["label"],
        read["known"],
        read["supervise"],
        read["known"] if cohort is None else cohort.contiguous(),
        num_rows,
        num_blocks,
        num_copies,
        num_cohorts,
        **constants,
        COHORTS=cohort is not None,
        WIDE_A=wide,
        ROWS=rows,
        num_warps=_SCATTER_WARPS,
    )
    bins = min(_MERGED_BINS, num_bins)
    merge_kernel[(num_cells // bins + num_cohorts * num_actions,)](
        totals["positives"],
        totals["negatives"],
        totals["sums"],
        copies,
        partials,
        num_blocks,
        num_copies,
        num_cells,
        B=num_bins,
        BINS=bins,
        num_warps=_MERGE_WARPS,
    )


def _is_shared(num_cohorts: int, num_actions: int, num_bins: int) -> bool:
    fewest, most = _SHARED_BINS
    return SHARED_ATOMICS and num_cohorts == 1 and num_actions <= _SHARED_ACTIONS and fewest <= num_bins <= most


def _tile(num_actions: int) -> tuple[int, int]:
    """Return rows and padded actions of a block of `scatter_kernel`."""
    wide = triton.next_power_of_2(num_actions)
    return max(1, _SCATTER_SCORES // wide), wide


def _rows(values_NA: Tensor) -> tuple[Tensor, int]:
    """Return values whose actions lie next to each other, and the stride of rows: a constant of the kernels.

    A stride that may change with the batch (a transposed tensor's) would compile anew each time, so it is copied away.
    """
    num_rows, num_actions = values_NA.shape
    row, column = values_NA.stride()
    if num_rows > 1 and (column == 1 or num_actions == 1) and row <= _MAX_ROW_STRIDE:
        return values_NA, row
    return values_NA.contiguous(), num_actions


def _scale(num_bins: int, low: float, high: float) -> float:
    """Return bins a unit of logit.

    Raises:
        ValueError: It is no power of two, or an edge is no multiple of a bin: fp32 would put scores into wrong bins.
    """
    scale = num_bins / (high - low)
    is_power = num_bins & (num_bins - 1) == 0 and scale >= 1 and math.frexp(scale)[0] == 0.5
    if not is_power or not (low * scale).is_integer() or abs(low * scale) + num_bins > 2**23:
        raise ValueError(
            f"the Triton kernel needs a power of two of bins, each 1 / 2^k wide, on multiples of that; got {num_bins} over "
            f"[{low}, {high}): ask for impl = 'reference'"
        )
    return scale


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launched() -> Iterator[Variant]:
    """Yield every compilation that is launched, with one, three and eight actions standing for all numbers of them."""
    pointers = {"labels": "*u8", "known": "*u8", "supervise": "*u8", "partials": "*fp64", "sums": "*fp64"}
    pointers |= {"positives": "*i64", "negatives": "*i64", "clipped": "*i64"}
    pointers |= {"tickets": "*i32", "copies": "*i32", "cohort": "*i32"}
    numbers = ("num_rows", "num_blocks", "blocks_a_program", "num_copies", "num_cohorts", "num_cells")
    bins = {"LOW": -16.0, "SCALE": 256.0, "B": 8192}

    def variant(kernel: Any, label: str, num_warps: int, constants: dict[str, Any], logits: str = "") -> Variant:
        known = {**pointers, "logits": logits, **dict.fromkeys(numbers, "i32")}
        signature = {name: known[name] for name in kernel.arg_names if name not in constants}
        return Variant(
            label=label, kernel=kernel, signature=signature, constants=constants, num_warps=num_warps, num_stages=3
        )

    for logits in _LOGITS.values():
        for num_actions in (1, 3, 8):
            rows, wide = _tile(num_actions)
            for supervised in (False, True):
                strides = dict.fromkeys(("LOGIT_ROW", "LABEL_ROW", "KNOWN_ROW"), num_actions)
                constants = {**bins, **strides, "A": num_actions, "SUPERVISED": supervised}
                label = f"{logits[1:]} A={num_actions}{' supervise' if supervised else ''}"
                if SHARED_ATOMICS:
                    yield variant(shared_kernel, label, _SHARED_WARPS, {**constants, "BLOCK": _SHARED_BLOCK}, logits)
                for cohorts in (False, True):
                    tile = {**constants, "COHORTS": cohorts, "WIDE_A": wide, "ROWS": rows}
                    yield variant(scatter_kernel, label + (" cohorts" if cohorts else ""), _SCATTER_WARPS, tile, logits)
    yield variant(merge_kernel, "", _MERGE_WARPS, {"B": bins["B"], "BINS": _MERGED_BINS})
