"""Lookups, merged gradients and rowwise Adagrad in Triton, as custom operators.

Deterministic on a device: every result, bit for bit, for equal inputs; nothing is added by atomics and ids are sorted stably.
Runs of up to 64 equal ids are added in the order of the entries, as on the CPU; longer ones in a fixed tree of 64s.

Blocks follow from the width alone: an update in place cannot be tuned by running it, and a lookup is bound by memory.
The host waits for nothing: how many rows a batch has stays on the device, and grids cover the most there can be.
Dims: as in reference; `E` entries (ids feature by feature), `C` columns of an output: D, or F * D side by side.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.embedding import triton_kernels as kernels
from kernels.embedding.triton_variants import BLOCK, CHUNK, WARPS, block_width, lanes_of, launched, warps_of

__all__ = ["embedding_lookup", "embedding_merge", "embedding_update", "launched", "rowwise_adagrad"]


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@torch.library.custom_op("gr::embedding_lookup", mutates_args=())
def embedding_lookup(
    weight: Tensor,
    ids: Tensor,
    tables: Tensor | None,
    fallback: Tensor | None,
    dtype: torch.dtype,
    *,
    concatenate: bool,
) -> Tensor:
    """Sum the rows of each bag, or lay them side by side: [R, D] and [B, F] to [B, C]; `Layout`'s tensors or None."""
    bags, features = ids.shape
    width = weight.shape[1]
    out = torch.empty(bags, features * width if concatenate else width, dtype=dtype, device=weight.device)
    if not out.numel():
        return out
    weight, ids = weight.contiguous(), ids.contiguous()
    lanes = lanes_of(width)
    with _on(weight):
        kernels.lookup_kernel[(triton.cdiv(bags, lanes),)](
            weight,
            ids,
            ids if tables is None else tables,
            ids if fallback is None else fallback,
            out,
            bags,
            features,
            WIDTH=width,
            CONCATENATE=concatenate,
            HAS_TABLES=tables is not None,
            BLOCK_B=lanes,
            BLOCK_D=block_width(width),
            num_warps=warps_of(width),
        )
    return out


@embedding_lookup.register_fake
def _(
    weight: Tensor,
    ids: Tensor,
    tables: Tensor | None,
    fallback: Tensor | None,
    dtype: torch.dtype,
    *,
    concatenate: bool,
) -> Tensor:
    bags, features = ids.shape
    width = weight.shape[1]
    return weight.new_empty(bags, features * width if concatenate else width, dtype=dtype)


@torch.library.custom_op("gr::embedding_lookup_backward", mutates_args=())
def embedding_lookup_backward(
    grad: Tensor,
    ids: Tensor,
    tables: Tensor | None,
    fallback: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
    *,
    concatenate: bool,
) -> Tensor:
    """Return the gradient of all rows, [R, D]: for a batch's distinct rows, not for whole tables."""
    width = grad.shape[1] // ids.shape[1] if concatenate else grad.shape[1]
    out = torch.zeros(num_rows, width, dtype=dtype, device=grad.device)
    source = _of_lookup(grad, ids, concatenate=concatenate)
    if ids.numel() and out.numel():
        keys = _keys(ids, tables, fallback, num_rows)
        _add_runs(source, keys, num_rows, kernels.DENSE.value, out)
    return out


@embedding_lookup_backward.register_fake
def _(
    grad: Tensor,
    ids: Tensor,
    tables: Tensor | None,
    fallback: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
    *,
    concatenate: bool,
) -> Tensor:
    return grad.new_empty(num_rows, grad.shape[1] // ids.shape[1] if concatenate else grad.shape[1], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    weight, ids, tables, fallback, _ = inputs
    ctx.concatenate = keyword_only_inputs["concatenate"]
    ctx.save_for_backward(ids, tables, fallback)
    ctx.rows, ctx.dtype = weight.shape[0], weight.dtype


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ids, tables, fallback = ctx.saved_tensors
    found = embedding_lookup_backward(grad, ids, tables, fallback, ctx.rows, ctx.dtype, concatenate=ctx.concatenate)
    return found, None, None, None, None


embedding_lookup.register_autograd(_grad, setup_context=_save)


@torch.library.custom_op("gr::embedding_merge", mutates_args=())
def embedding_merge(
    grad: Tensor, ids: Tensor, tables: Tensor | None, fallback: Tensor | None, num_rows: int, *, concatenate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return distinct rows ascending, [N] int64, their gradients, [N, D] fp32, and how many there are, [1] int32.

    N is the most there can be, min(B * F, R); behind the last row come rows -1 with a gradient of zero.
    """
    width = grad.shape[1] // ids.shape[1] if concatenate else grad.shape[1]
    most = min(ids.numel(), num_rows)
    rows = torch.empty(most, dtype=torch.int64, device=grad.device)
    out = torch.empty(most, width, dtype=torch.float32, device=grad.device)
    if not out.numel():
        return rows, out, torch.zeros(1, dtype=torch.int32, device=grad.device)
    keys = _keys(ids, tables, fallback, num_rows)
    count = _add_runs(_of_lookup(grad, ids, concatenate=concatenate), keys, num_rows, kernels.MERGED.value, out, rows)
    return rows, out, count


@embedding_merge.register_fake
def _(
    grad: Tensor, ids: Tensor, tables: Tensor | None, fallback: Tensor | None, num_rows: int, *, concatenate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = grad.shape[1] // ids.shape[1] if concatenate else grad.shape[1]
    most = min(ids.numel(), num_rows)
    return (
        grad.new_empty(most, dtype=torch.int64),
        grad.new_empty(most, width, dtype=torch.float32),
        grad.new_empty(1, dtype=torch.int32),
    )


@torch.library.custom_op("gr::embedding_update", mutates_args={"weight", "accumulator"})
def embedding_update(
    weight: Tensor,
    accumulator: Tensor,
    grad: Tensor,
    ids: Tensor,
    tables: Tensor | None,
    fallback: Tensor | None,
    learning_rate: float,
    eps: float,
    seed: int,
    *,
    concatenate: bool,
) -> None:
    """Merge a lookup's gradient by row and move each row once, in place; a seed below 0 rounds to nearest."""
    num_rows = weight.shape[0]
    if ids.numel() and weight.numel():
        keys = _keys(ids, tables, fallback, num_rows)
        source = _of_lookup(grad, ids, concatenate=concatenate)
        _add_runs(source, keys, num_rows, kernels.UPDATE.value, weight, None, accumulator, (learning_rate, eps, seed))


@torch.library.custom_op("gr::rowwise_adagrad", mutates_args={"weight", "accumulator"})
def rowwise_adagrad(
    weight: Tensor, accumulator: Tensor, rows: Tensor, grad: Tensor, learning_rate: float, eps: float, seed: int
) -> None:
    """Move distinct rows [U] along their gradients [U, D], in place; a seed below 0 rounds to nearest."""
    if not grad.numel():
        return
    width = weight.shape[1]
    lanes = lanes_of(width)
    with _on(weight):
        kernels.adagrad_kernel[(triton.cdiv(rows.numel(), lanes),)](
            weight,
            accumulator,
            rows.contiguous(),
            grad.contiguous(),
            rows.numel(),
            learning_rate,
            eps,
            max(seed, 0),
            WIDTH=width,
            STOCHASTIC=seed >= 0,
            BLOCK_U=lanes,
            BLOCK_D=block_width(width),
            num_warps=warps_of(width),
        )


@embedding_update.register_fake
@rowwise_adagrad.register_fake
def _(*given: Any, **flags: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Gradients by entry: entry e is of bag e % bags and feature e // bags."""

    grad: Tensor
    bags: int
    bag_rows: int
    """Rows of D from one bag to the next."""
    feature_rows: int
    """Rows of D from one feature to the next; 0 where all of a bag have the same gradient."""


def _of_lookup(grad: Tensor, ids: Tensor, *, concatenate: bool) -> _Source:
    bags, features = ids.shape
    rows = (features, 1) if concatenate else (1, 0)
    return _Source(grad=grad.contiguous(), bags=bags, bag_rows=rows[0], feature_rows=rows[1])


def _keys(ids: Tensor, tables: Tensor | None, fallback: Tensor | None, num_rows: int) -> Tensor:
    """Return each entry's flat row, [E]; num_rows for absent ones. As narrow as can be: it is what sorting costs."""
    bags, features = ids.shape
    if ids.numel() > kernels.MOST_ENTRIES:
        raise ValueError(f"a batch has at most 2^31 - 2^16 ids, got {bags} bags of {features}; split it")
    ids = ids.contiguous()
    keys = torch.empty(ids.numel(), dtype=torch.int32 if num_rows < 2**31 else torch.int64, device=ids.device)
    with _on(ids):
        kernels.keys_kernel[(triton.cdiv(ids.numel(), BLOCK),)](
            ids,
            ids if tables is None else tables,
            ids if fallback is None else fallback,
            keys,
            bags,
            features,
            ids.numel(),
            num_rows,
            HAS_TABLES=tables is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return keys


def _add_runs(
    source: _Source,
    keys: Tensor,
    num_rows: int,
    mode: int,
    out: Tensor,
    rows: Tensor | None = None,
    accumulator: Tensor | None = None,
    step: tuple[float, float, int] = (0.0, 0.0, -1),
) -> Tensor:
    """Sort entries by key [E], add up each run of equal ones and put the sums where `mode` says.

    Args:
        source: Gradients of the entries.
        keys: Flat row of each entry; num_rows: absent.
        num_rows: R.
        mode: DENSE, MERGED or UPDATE.
        out: Gradient of all rows; merged gradients; or the weight.
        rows: Merged rows.
        accumulator: Adagrad's.
        step: Learning rate, eps and seed of an update.

    Returns:
        How many distinct rows there are, [1] int32.
    """
    entries, width = keys.numel(), out.shape[1]
    keys, order = torch.sort(keys, stable=True)
    heads = torch.ones(entries, dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=heads[1:])
    run = torch.cumsum(heads, 0, dtype=torch.int32)
    start = torch.empty(entries + 1, dtype=torch.int32, device=keys.device)
    count = torch.empty(1, dtype=torch.int32, device=keys.device)
    windows = triton.cdiv(entries, CHUNK)
    scratch = torch.empty(windows, width, dtype=torch.float32, device=keys.device)
    most = min(entries, num_rows)
    lanes = lanes_of(width)
    strides = (source.bags, source.bag_rows, source.feature_rows)
    spare = keys  # stands in for tensors that the mode does not use
    ends = (out, spare if rows is None else rows, spare if accumulator is None else accumulator)
    rates = (step[0], step[1], max(step[2], 0))
    how = {"MODE": mode, "STOCHASTIC": step[2] >= 0, "WIDTH": width, "CHUNK": CHUNK, "BLOCK_D": block_width(width)}
    with _on(keys):
        grid = (triton.cdiv(entries, BLOCK),)
        kernels.starts_kernel[grid](keys, run, start, count, entries, num_rows, BLOCK=BLOCK, num_warps=WARPS)
        kernels.short_runs_kernel[(triton.cdiv(most, lanes),)](
            source.grad,
            order,
            keys,
            start,
            count,
            *ends,
            *strides,
            most,
            *rates,
            **how,
            BLOCK_U=lanes,
            num_warps=warps_of(width),
        )
        if entries > CHUNK:
            window = (source.grad, order, keys, run, start, scratch)
            kernels.long_pieces_kernel[(windows,)](
                *window,
                *strides,
                num_rows,
                WIDTH=width,
                CHUNK=CHUNK,
                BLOCK_E=lanes,
                BLOCK_D=block_width(width),
                num_warps=warps_of(width),
            )
            kernels.long_runs_kernel[(windows,)](
                *window, *ends, *strides, num_rows, *rates, **how, BLOCK_E=lanes, num_warps=warps_of(width)
            )
    return count
