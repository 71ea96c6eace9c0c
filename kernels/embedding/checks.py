"""What the embedding functions check before they start: shapes and dtypes; values on the CPU alone, never on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embedding.layout import Layout

MAX_WIDTH = 2048
"""Widest row that the Triton kernels take: one program holds it, and needs all of it for Adagrad's mean."""
_DTYPES = (torch.float32, torch.bfloat16)


def check_kernel(*tensors: Tensor, state: Tensor | None = None, parts: int = 1) -> None:
    """Raise ValueError where Triton's kernels do not take the tensors.

    Args:
        tensors: Weight, values or gradients; the weight first where it is changed in place.
        state: Its accumulator, which says that it is.
        parts: Rows side by side in each row of the tensors.
    """
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.shape[1] > MAX_WIDTH * parts:
            raise ValueError(
                f"the Triton kernel of embedding takes fp32 and bf16 rows of at most {MAX_WIDTH}, got {tensor.dtype} "
                f"{tuple(tensor.shape)}; ask for impl = 'reference'"
            )
    if state is not None and (
        state.dtype != torch.float32 or not state.is_contiguous() or not tensors[0].is_contiguous()
    ):
        raise ValueError(
            f"the Triton kernel of rowwise Adagrad needs a contiguous weight and a contiguous fp32 accumulator, got strides "
            f"{tensors[0].stride()} and {state.stride()}, accumulator {state.dtype}"
        )


def check_rows(name: str, rows: Tensor, limit: int) -> None:
    """Raise ValueError where rows are not int64, or on the CPU, outside a compiled graph, not all in [0, limit)."""
    if rows.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {rows.dtype}")
    known = type(rows) is Tensor and rows.device.type == "cpu"  # a fake one has no values, a device would be waited for
    if not known or torch.compiler.is_compiling() or not rows.numel():
        return
    low, high = (int(end) for end in rows.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in [0, {limit}), got {low} to {high}")


def check_seed(seed: int | None, weight_RD: Tensor) -> None:
    """Raise ValueError where a seed is out of range or has nothing to round."""
    if seed is not None and (weight_RD.dtype != torch.bfloat16 or not 0 <= seed < 2**31):
        raise ValueError(f"a seed, in [0, 2^31), rounds a bf16 weight; got {seed} and a weight of {weight_RD.dtype}")


def check_tables(weight_RD: Tensor, ids_BF: Tensor, layout: Layout) -> None:
    """Raise ValueError where weight, ids and layout do not belong together."""
    if weight_RD.dim() != 2 or ids_BF.dim() != 2 or ids_BF.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"need weight [R, D] and ids [B, F] of int32 or int64, got {tuple(weight_RD.shape)} and {tuple(ids_BF.shape)} "
            f"of {ids_BF.dtype}"
        )
    if ids_BF.shape[1] != layout.tables.shape[0] or layout.num_rows > weight_RD.shape[0]:
        raise ValueError(
            f"layout of {layout.tables.shape[0]} features over {layout.num_rows} rows does not fit ids "
            f"{tuple(ids_BF.shape)} and weight {tuple(weight_RD.shape)}"
        )


def check_gradient(
    grad_BC: Tensor, ids_BF: Tensor, layout: Layout, *, concatenate: bool, width: int | None = None
) -> None:
    """Raise ValueError where a lookup of the ids does not have such a gradient; width is D where it is known."""
    bags, features = ids_BF.shape
    parts = features if concatenate else 1
    wide = grad_BC.shape[1] if grad_BC.dim() == 2 else -1
    fits = wide >= 0 and len(grad_BC) == bags and features == len(layout.tables)
    if not fits or (wide % parts if parts and width is None else wide != parts * (width or 0)):
        raise ValueError(
            f"gradient {tuple(grad_BC.shape)} is not of a lookup of ids {tuple(ids_BF.shape)} in {len(layout.tables)} "
            f"features{' side by side' if concatenate else ''}{'' if width is None else f' of width {width}'}"
        )
