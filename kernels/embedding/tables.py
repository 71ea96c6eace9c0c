"""Lookup over the tables of all features in one launch, straight from the flat weight, and what its gradient does to them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.choice import Impl, choose
from kernels.embedding.checks import check_gradient, check_kernel, check_seed, check_tables
from kernels.embedding.layout import Layout
from kernels.embedding.reference import (
    lookup_tables_reference,
    merge_table_gradients_reference,
    rowwise_adagrad_reference,
)


def lookup_tables(
    weight_RD: Tensor,
    ids_BF: Tensor,
    layout: Layout,
    *,
    concatenate: bool = False,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Read the tables of all features at once and sum a bag's rows, or lay them side by side.

    Pad rows and ids below 0 are zero; ids that a table does not know read its fallback rows; see `Layout`. Differentiable
    with respect to the weight, for small tables: that gradient has all rows. `update_tables` is for large ones.

    Args:
        weight_RD: All rows, [R, D], fp32 or bf16.
        ids_BF: Row of each feature's table, [B, F], int32 or int64.
        layout: Of the F features, on the same device.
        concatenate: Whether features lie side by side instead of being summed.
        out_dtype: fp32 or bf16; None: the weight's. Sums are fp32 inside and rounded once.
        impl: See `kernels.choice.choose`.

    Returns:
        [B, D], or [B, F * D] side by side.

    Raises:
        ValueError: Shapes or dtypes that do not belong together, or what Triton's kernel does not take.
        RuntimeError: Triton cannot run there.
    """
    check_tables(weight_RD, ids_BF, layout)
    dtype = out_dtype or weight_RD.dtype
    if choose("embedding", impl, weight_RD) == "triton":
        from kernels.embedding import triton_op

        check_kernel(weight_RD)
        found: Tensor = triton_op.embedding_lookup(
            weight_RD, ids_BF, layout.tables, layout.fallback, dtype, concatenate=concatenate
        )
        return found
    return lookup_tables_reference(weight_RD, ids_BF, layout, concatenate=concatenate, out_dtype=dtype)


def merge_table_gradients(
    grad_BC: Tensor, ids_BF: Tensor, layout: Layout, *, concatenate: bool = False, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Return distinct rows [U] ascending and their gradients [U, D] fp32; the host waits to learn U.

    Args:
        grad_BC: Gradient of what `lookup_tables` returned, [B, D], or [B, F * D] side by side.
        ids_BF: As the lookup had them.
        layout: As the lookup had it.
        concatenate: As the lookup had it.
        impl: See `kernels.choice.choose`.

    Raises:
        ValueError: Shapes that do not belong together, or what Triton's kernel does not take.
        RuntimeError: Triton cannot run there.
    """
    check_gradient(grad_BC, ids_BF, layout, concatenate=concatenate)
    if choose("embedding", impl, grad_BC) == "triton":
        from kernels.embedding import triton_op

        check_kernel(grad_BC, parts=ids_BF.shape[1] if concatenate else 1)
        tables, rows = (layout.tables, layout.fallback), layout.num_rows
        rows_N, merged_ND, count = triton_op.embedding_merge(grad_BC, ids_BF, *tables, rows, concatenate=concatenate)
        distinct = int(count)
        return rows_N[:distinct], merged_ND[:distinct]
    return merge_table_gradients_reference(grad_BC, ids_BF, layout, concatenate=concatenate)


def update_tables(
    weight_RD: Tensor,
    accumulator_R: Tensor,
    grad_BC: Tensor,
    ids_BF: Tensor,
    layout: Layout,
    *,
    learning_rate: float,
    eps: float = 1e-8,
    concatenate: bool = False,
    seed: int | None = None,
    impl: Impl = "auto",
) -> None:
    """Merge a lookup's gradient by row and move each touched row once, by rowwise Adagrad, in place.

    Under Triton merged gradients are never written, and the host does not wait. Formula as `rowwise_adagrad_reference`.

    Args:
        weight_RD: All rows, [R, D], fp32 or bf16, contiguous.
        accumulator_R: One number a row, [R], fp32.
        grad_BC: Gradient of what `lookup_tables` returned, [B, D], or [B, F * D] side by side.
        ids_BF: As the lookup had them.
        layout: As the lookup had it.
        learning_rate: Step size.
        eps: Added to the root.
        concatenate: As the lookup had it.
        seed: Of the step, below 2^31, to round a bf16 weight stochastically; None: to nearest.
        impl: See `kernels.choice.choose`.

    Raises:
        ValueError: Shapes or dtypes that do not belong together, or what Triton's kernel does not take.
        RuntimeError: Triton cannot run there.
    """
    check_tables(weight_RD, ids_BF, layout)
    check_gradient(grad_BC, ids_BF, layout, concatenate=concatenate, width=weight_RD.shape[1])
    check_seed(seed, weight_RD)
    if accumulator_R.shape != weight_RD.shape[:1]:
        raise ValueError(
            f"accumulator {tuple(accumulator_R.shape)} must have one entry a row of {tuple(weight_RD.shape)}"
        )
    if choose("embedding", impl, weight_RD) == "triton":
        from kernels.embedding import triton_op

        check_kernel(weight_RD, state=accumulator_R)
        triton_op.embedding_update(
            weight_RD,
            accumulator_R,
            grad_BC,
            ids_BF,
            layout.tables,
            layout.fallback,
            learning_rate,
            eps,
            -1 if seed is None else seed,
            concatenate=concatenate,
        )
        return
    rows_U, grad_UD = merge_table_gradients_reference(grad_BC, ids_BF, layout, concatenate=concatenate)
    rates = {"learning_rate": learning_rate, "eps": eps}
    rowwise_adagrad_reference(weight_RD, accumulator_R, rows_U, grad_UD, seed=seed, **rates)
