"""Fused embedding lookup and rowwise Adagrad in plain torch: the specification.

Several tables lie end to end in one flat weight, so that one lookup serves every feature of a batch.
Dims: `M` looked-up ids, `U` distinct rows among them, `R` rows of all tables, `D` model dim, `B` bags, `F` ids a bag.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_ids_reference(ids_M: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Find the distinct rows among ids, so that a row is read, differentiated and updated once.

    Args:
        ids_M: Rows of the flat weight, [M], int64, each in [0, num_rows).
        num_rows: R.

    Returns:
        The distinct rows ascending, [U], int64; and each id's place among them, [M], int64.
    """
    # counting is linear; sorting pays only where the tables are far larger than the batch
    if num_rows > 8 * max(ids_M.numel(), 1):
        rows_U, place_M = torch.unique(ids_M, return_inverse=True)
        return rows_U, place_M
    seen_R = torch.zeros(num_rows, dtype=torch.bool, device=ids_M.device)
    seen_R[ids_M] = True
    rows_U = seen_R.nonzero().squeeze(1)
    place_R = torch.empty(num_rows, dtype=torch.int64, device=ids_M.device)
    place_R[rows_U] = torch.arange(rows_U.numel(), device=ids_M.device)
    return rows_U, place_R[ids_M]


def fused_lookup_reference(values_UD: Tensor, place_BF: Tensor) -> Tensor:
    """Sum the rows of each bag.

    Args:
        values_UD: Distinct rows, [U, D], float; gradients arrive here with duplicates merged.
        place_BF: Place of each id among the distinct rows, [B, F], int64.

    Returns:
        [B, D], values' dtype; zero where F is 0.
    """
    total_BD = values_UD.new_zeros(place_BF.shape[0], values_UD.shape[1])
    for column in range(place_BF.shape[1]):
        total_BD = total_BD + F.embedding(place_BF[:, column], values_UD)
    return total_BD


def rowwise_adagrad_reference(
    weight_RD: Tensor, accumulator_R: Tensor, rows_U: Tensor, grad_UD: Tensor, *, learning_rate: float, eps: float
) -> None:
    """Update touched rows in place: accumulator += mean(grad^2); row -= lr * grad / (sqrt(accumulator) + eps).

    Args:
        weight_RD: All rows, [R, D], fp32; changed in place.
        accumulator_R: One number a row, [R], fp32; changed in place.
        rows_U: Distinct rows, [U], int64; a row must not stand twice.
        grad_UD: Their gradients, [U, D], fp32.
        learning_rate: Step size.
        eps: Added to the root, so that an untouched accumulator does not divide by zero.
    """
    state_U = accumulator_R[rows_U] + grad_UD.square().mean(dim=1)
    accumulator_R[rows_U] = state_U
    weight_RD.index_add_(0, rows_U, grad_UD / (state_U.sqrt() + eps)[:, None], alpha=-learning_rate)
