"""Fused embedding lookup and rowwise Adagrad in plain torch: the specification.

Several tables lie end to end in one flat weight, so that one lookup serves every feature of a batch.
Dims: `M` looked-up ids, `U` distinct rows among them, `R` rows of all tables, `D` model dim, `B` bags, `F` ids a bag.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.embedding.layout import PAD_ROW, Layout

_LOW = 0xFFFFFFFF


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


def map_rows_reference(ids_BF: Tensor, layout: Layout) -> Tensor:
    """Return the flat row of each table's id, [B, F], int64; -1 where it is absent. See `Layout`."""
    first, known, named, begin = layout.tables.unbind(1)
    local = ids_BF.to(torch.int64)
    fallback = layout.fallback[begin + torch.minimum(local, named - 1).clamp(min=0)]
    local = torch.where(local < known, local, fallback)
    return torch.where(local > PAD_ROW, local + first, -1)


def lookup_tables_reference(
    weight_RD: Tensor, ids_BF: Tensor, layout: Layout, *, concatenate: bool, out_dtype: torch.dtype
) -> Tensor:
    """Sum the rows of each bag, or lay them side by side; absent ids are zero.

    Args:
        weight_RD: All rows, [R, D], float; fp32 inside where it is narrower.
        ids_BF: Row of each feature's table, [B, F], int32 or int64.
        layout: Of the F features.
        concatenate: Whether features lie side by side instead of being summed.
        out_dtype: Of what is returned.

    Returns:
        [B, D], or [B, F * D] side by side.
    """
    row_BF = map_rows_reference(ids_BF, layout)
    picked_BFD = F.embedding(row_BF.clamp(min=0), weight_RD).to(torch.promote_types(weight_RD.dtype, torch.float32))
    picked_BFD = picked_BFD.masked_fill(row_BF[:, :, None] < 0, 0.0)
    return (picked_BFD.flatten(1) if concatenate else picked_BFD.sum(dim=1)).to(out_dtype)


def merge_table_gradients_reference(
    grad_BC: Tensor, ids_BF: Tensor, layout: Layout, *, concatenate: bool
) -> tuple[Tensor, Tensor]:
    """Add up what the gradient of a lookup says of each row, feature by feature.

    Args:
        grad_BC: Gradient of what the lookup returned, [B, D], or [B, F * D] side by side.
        ids_BF: As the lookup had them.
        layout: As the lookup had it.
        concatenate: As the lookup had it.

    Returns:
        Distinct rows ascending, [U], int64, absent ids left out; and their gradients, [U, D], fp32 or wider.
    """
    bags, features = ids_BF.shape
    width = grad_BC.shape[1] // features if concatenate else grad_BC.shape[1]
    grad_BFD = grad_BC.view(bags, features, width) if concatenate else grad_BC[:, None].expand(-1, features, -1)
    row_M = map_rows_reference(ids_BF, layout).t().reshape(-1)
    grad_MD = grad_BFD.transpose(0, 1).reshape(bags * features, width)[row_M >= 0]
    rows_U, place_M = torch.unique(row_M[row_M >= 0], return_inverse=True)
    wide = torch.promote_types(grad_BC.dtype, torch.float32)
    merged_UD = torch.zeros(len(rows_U), width, dtype=wide, device=grad_BC.device)
    return rows_U, merged_UD.index_add_(0, place_M, grad_MD.to(wide))


def rowwise_adagrad_reference(
    weight_RD: Tensor,
    accumulator_R: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    *,
    learning_rate: float,
    eps: float,
    seed: int | None = None,
) -> None:
    """Update touched rows in place: accumulator += mean(grad^2); row -= lr * grad / (sqrt(accumulator) + eps).

    Args:
        weight_RD: All rows, [R, D], fp32, or bf16, which is moved in fp32 and rounded; changed in place.
        accumulator_R: One number a row, [R], fp32; changed in place.
        rows_U: Distinct rows, [U], int64; a row must not stand twice.
        grad_UD: Their gradients, [U, D].
        learning_rate: Step size.
        eps: Added to the root, so that an untouched accumulator does not divide by zero.
        seed: Of `round_stochastically`, for a bf16 weight; None: to nearest.
    """
    grad_UD = grad_UD.to(accumulator_R.dtype)
    state_U = accumulator_R[rows_U] + grad_UD.square().mean(dim=1)
    accumulator_R[rows_U] = state_U
    step_UD = grad_UD / (state_U.sqrt() + eps)[:, None]
    moved_UD = torch.add(weight_RD[rows_U].to(step_UD.dtype), step_UD, alpha=-learning_rate)
    weight_RD[rows_U] = moved_UD.to(weight_RD.dtype) if seed is None else round_stochastically(moved_UD, rows_U, seed)


def round_stochastically(values_UD: Tensor, rows_U: Tensor, seed: int) -> Tensor:
    """Round fp32 to bf16, up as often as the share of the gap that lies below: small steps are not lost on average.

    What decides is a hash of the row, the column and the seed (the finalizer of MurmurHash3, Appleby 2011), so that a
    step repeats bit for bit, in any order of the rows. What is not finite stays as it is.

    Args:
        values_UD: [U, D], fp32.
        rows_U: Flat rows, [U], int64.
        seed: Of the step.
    """
    column_D = torch.arange(values_UD.shape[1], device=values_UD.device)
    mixed = _times(rows_U & _LOW, 0x9E3779B1)[:, None] ^ _times(rows_U >> 32, 0x27D4EB2F)[:, None]
    hashed = (mixed + _times(column_D, 0x85EBCA77) + (seed * 0xC2B2AE3D & _LOW)) & _LOW
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    noise = (hashed ^ (hashed >> 16)) >> 16
    bits = values_UD.contiguous().view(torch.int32).to(torch.int64) + noise
    rounded = (bits >> 16 << 16).to(torch.int32).view(torch.float32)
    return torch.where(values_UD.isfinite(), rounded, values_UD).to(torch.bfloat16)


def _times(left: Tensor, right: int) -> Tensor:
    """Return the low 32 bits of a product of 32-bit numbers; its high half is taken apart, as int64 is signed."""
    return (left * (right & 0xFFFF) + ((left * (right >> 16) & 0xFFFF) << 16)) & _LOW
