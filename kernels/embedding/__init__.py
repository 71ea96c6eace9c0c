"""Embedding kernels: merge duplicate ids, one fused lookup for all tables, rowwise Adagrad on touched rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.embedding.fused import FusedLookup, rowwise_adagrad_rows
from kernels.embedding.reference import merge_ids_reference

__all__ = ["fused_lookup", "merge_gradients", "merge_ids", "rowwise_adagrad"]


def merge_ids(ids_M: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct rows [U] and each id's place among them [M]; see `merge_ids_reference`.

    Raises:
        ValueError: The ids are not one-dimensional int64.
    """
    if ids_M.dim() != 1 or ids_M.dtype != torch.int64:
        raise ValueError(f"ids must be [M] int64, got {tuple(ids_M.shape)} {ids_M.dtype}")
    return merge_ids_reference(ids_M, num_rows)


def fused_lookup(values_UD: Tensor, place_BF: Tensor) -> Tensor:
    """Sum the rows of each bag: [U, D] and [B, F] to [B, D]; see `fused_lookup_reference`.

    Raises:
        ValueError: Shapes that do not belong together.
    """
    if values_UD.dim() != 2 or place_BF.dim() != 2:
        raise ValueError(f"need values [U, D] and places [B, F], got {values_UD.shape} and {place_BF.shape}")
    if place_BF.numel() == 0:
        return values_UD.new_zeros(place_BF.shape[0], values_UD.shape[1])
    total_BD: Tensor = FusedLookup.apply(values_UD, place_BF)
    return total_BD


def merge_gradients(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the (rows [U], gradients [U, D]) of several micro-batches into one gradient a row.

    Args:
        parts: At least one pair; within a pair rows are distinct.

    Returns:
        Distinct rows ascending, and the sum of their gradients.
    """
    if len(parts) == 1:
        return parts[0]
    rows_M = torch.cat([rows for rows, _ in parts])
    rows_U, place_M = torch.unique(rows_M, return_inverse=True)
    grads_MD = torch.cat([grads for _, grads in parts])
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
) -> None:
    """Update touched rows and their accumulators in place; see `rowwise_adagrad_reference`.

    Raises:
        ValueError: Shapes that do not belong together.
    """
    if grad_UD.shape != (rows_U.numel(), weight_RD.shape[1]) or accumulator_R.shape != weight_RD.shape[:1]:
        raise ValueError(
            f"gradient {tuple(grad_UD.shape)} must match {rows_U.numel()} rows of weight {tuple(weight_RD.shape)}, and "
            f"the accumulator {tuple(accumulator_R.shape)} must have one entry a row"
        )
    rowwise_adagrad_rows(weight_RD, accumulator_R, rows_U, grad_UD, learning_rate=learning_rate, eps=eps)
