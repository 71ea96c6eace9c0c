"""Embedding kernels: merge duplicate ids, one fused lookup for all tables, rowwise Adagrad on touched rows.

Two ways to train. A batch's distinct rows are merged on the host, read, looked up and differentiated (`merge_ids`,
`fused_lookup`, `rowwise_adagrad`), which shards over ranks; or ids stay as they are and one launch reads the tables
themselves (`lookup_tables`), whose gradient is merged and applied on the device (`update_tables`).

Deterministic, bit for bit, for equal inputs on one device: all of it under Triton, which sorts ids stably and adds without
atomics. Not: the reference on CUDA, where torch's index_add_ adds in any order; and CPU against CUDA agree to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.choice import Impl, choose
from kernels.embedding.checks import check_kernel, check_rows, check_seed
from kernels.embedding.fused import FusedLookup, rowwise_adagrad_rows
from kernels.embedding.layout import Layout
from kernels.embedding.reference import merge_ids_reference, rowwise_adagrad_reference
from kernels.embedding.tables import lookup_tables, merge_table_gradients, update_tables

__all__ = [
    "Layout",
    "fused_lookup",
    "lookup_tables",
    "merge_gradients",
    "merge_ids",
    "merge_table_gradients",
    "rowwise_adagrad",
    "update_tables",
]

_NO_LIMIT = 2**63 - 1  # rows there may be, where nobody said


def merge_ids(ids_M: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct rows [U] and each id's place among them [M]; see `merge_ids_reference`.

    Raises:
        ValueError: The ids are not one-dimensional int64.
    """
    if ids_M.dim() != 1 or ids_M.dtype != torch.int64:
        raise ValueError(f"ids must be [M] int64, got {tuple(ids_M.shape)} {ids_M.dtype}")
    return merge_ids_reference(ids_M, num_rows)


def fused_lookup(values_UD: Tensor, place_BF: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Sum the rows of each bag: [U, D] and [B, F] to [B, D]; see `fused_lookup_reference`.

    Args:
        values_UD: Distinct rows, [U, D], float; fp32 or bf16 under Triton, which adds up in fp32.
        place_BF: Place of each id among them, [B, F], int64; none is checked on CUDA.
        impl: See `kernels.choice.choose`.

    Raises:
        ValueError: Shapes that do not belong together, places that are not among the rows, or a width or dtype that Triton's kernel does not take.
        RuntimeError: Triton cannot run there.
    """
    if values_UD.dim() != 2 or place_BF.dim() != 2:
        raise ValueError(f"need values [U, D] and places [B, F], got {values_UD.shape} and {place_BF.shape}")
    if place_BF.numel() == 0:
        return values_UD.new_zeros(place_BF.shape[0], values_UD.shape[1])
    check_rows("places", place_BF, len(values_UD))
    if choose("embedding", impl, values_UD) == "triton":
        from kernels.embedding import triton_op

        check_kernel(values_UD)
        found: Tensor = triton_op.embedding_lookup(values_UD, place_BF, None, None, values_UD.dtype, concatenate=False)
        return found
    total_BD: Tensor = FusedLookup.apply(values_UD, place_BF)
    return total_BD


def merge_gradients(parts: Sequence[tuple[Tensor, Tensor]], *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Merge the (rows [U], gradients [U, D]) of several micro-batches into one gradient a row.

    Args:
        parts: At least one pair; within a pair rows are distinct, from 0 (not checked on CUDA).
        impl: See `kernels.choice.choose`.

    Returns:
        Distinct rows ascending, and the sum of their gradients, added part after part.

    Raises:
        ValueError: No pair, rows below 0, or a width or dtype that Triton's kernel does not take.
        RuntimeError: Triton cannot run there.
    """
    if not parts:
        raise ValueError("there is nothing to merge: no pair of rows and gradients")
    for rows, _ in parts:
        check_rows("rows", rows, _NO_LIMIT)
    if len(parts) == 1:
        return parts[0]
    rows_M = torch.cat([rows for rows, _ in parts])
    grads_MD = torch.cat([grads for _, grads in parts])
    if choose("embedding", impl, grads_MD) == "triton":
        from kernels.embedding import triton_op

        check_kernel(grads_MD)
        found = triton_op.embedding_merge(grads_MD, rows_M[:, None], None, None, _NO_LIMIT, concatenate=False)
        rows_N, merged_ND, count = found
        distinct = int(count)  # the host waits here: callers use the shape
        return rows_N[:distinct], merged_ND[:distinct].to(grads_MD.dtype)
    rows_U, place_M = torch.unique(rows_M, return_inverse=True)
    merged_UD = grads_MD.new_zeros(rows_U.numel(), grads_MD.shape[1])
    return rows_U, merged_UD.index_add_(0, place_M, grads_MD)


def rowwise_adagrad(
    weight_RD: Tensor,
    accumulator_R: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    *,
    learning_rate: float,
    eps: float = 1e-8,
    seed: int | None = None,
    impl: Impl = "auto",
) -> None:
    """Update touched rows and their accumulators in place; see `rowwise_adagrad_reference`.

    Args:
        weight_RD: All rows, [R, D], fp32 or bf16, contiguous.
        accumulator_R: One number a row, [R], fp32.
        rows_U: Distinct rows, [U], int64; none is checked on CUDA.
        grad_UD: Their gradients, [U, D].
        learning_rate: Step size.
        eps: Added to the root.
        seed: Of the step, below 2^31, to round a bf16 weight stochastically; None: to nearest.
        impl: See `kernels.choice.choose`.

    Raises:
        ValueError: Shapes that do not belong together, a seed for a weight that is not bf16, or what Triton's kernel does
            not take.
        RuntimeError: Triton cannot run there.
    """
    if grad_UD.shape != (rows_U.numel(), weight_RD.shape[1]) or accumulator_R.shape != weight_RD.shape[:1]:
        raise ValueError(
            f"gradient {tuple(grad_UD.shape)} must match {rows_U.numel()} rows of weight {tuple(weight_RD.shape)}, and "
            f"the accumulator {tuple(accumulator_R.shape)} must have one entry a row"
        )
    check_seed(seed, weight_RD)
    check_rows("rows", rows_U, len(weight_RD))
    if choose("embedding", impl, weight_RD) == "triton":
        from kernels.embedding import triton_op

        check_kernel(weight_RD, grad_UD, state=accumulator_R)
        number = -1 if seed is None else seed
        triton_op.rowwise_adagrad(weight_RD, accumulator_R, rows_U, grad_UD, learning_rate, eps, number)
    elif seed is not None:
        rates = {"learning_rate": learning_rate, "eps": eps}
        rowwise_adagrad_reference(weight_RD, accumulator_R, rows_U, grad_UD, seed=seed, **rates)
    else:
        rowwise_adagrad_rows(weight_RD, accumulator_R, rows_U, grad_UD, learning_rate=learning_rate, eps=eps)
