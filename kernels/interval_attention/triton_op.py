"""Interval attention as torch custom operators, `gr::interval_attention` and its backward, launched through Triton.

Dims: `N` queries, `T` keys, `H` heads, `K` head dim, `B` buckets of a distance.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.interval_attention.triton_backward import bias_grad_kernel
from kernels.interval_attention.triton_configs import (
    CHUNK,
    DECAY,
    GRAIN,
    LARGEST_HEAD,
    SILU,
    SOFTMAX,
    absent,
    block_of,
    configs,
    launched,
    tuned_kernel,
)
from kernels.interval_attention.triton_reach import bounds_kernel, reach_kernel
from kernels.interval_attention.weighting import NUM_BUCKETS, Decay, Silu

__all__ = ["interval_attention_triton", "launched"]

_LARGEST = 2**31 - 2**16  # numbers of queries and keys are 32 bits, and a tile's last may lie behind the last one
_LARGEST_STRIDE = 2**23  # places inside a tile of 128 rows are 32 bits; where a tile begins is 64

_COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, Tensor itself, Tensor? query_time, Tensor? key_time, "
    "Tensor? query_place, Tensor? key_place, Tensor? position_bias, Tensor? time_bias, float half_life_us, float divisor"
)


def interval_attention_triton(
    q_NHK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    lo_N: Tensor,
    hi_N: Tensor,
    itself_N: Tensor,
    weighting: Decay | Silu | None,
) -> Tensor:
    """Attend by the Triton kernels; see `kernels.interval_attention.interval_attention`.

    Raises:
        ValueError: A dtype, head dim or size that the kernels have not.
    """
    _check(q_NHK, k_THK, v_THK)
    times: tuple[Tensor | None, ...] = (None, None)
    places: tuple[Tensor | None, ...] = (None, None)
    biases: tuple[Tensor | None, ...] = (None, None)
    half_life_us = divisor = 1.0
    if weighting is not None:
        times = (weighting.query_time.long().contiguous(), weighting.key_time.long().contiguous())
    if isinstance(weighting, Decay):
        half_life_us = weighting.half_life_us
    if isinstance(weighting, Silu):
        places = (weighting.query_position.int().contiguous(), weighting.key_position.int().contiguous())
        biases = (weighting.position_bias, weighting.time_bias)
        divisor = weighting.divisor
    intervals = (x.int().contiguous() for x in (lo_N, hi_N, itself_N))
    out, _lse = torch.ops.gr.interval_attention(
        q_NHK, k_THK, v_THK, *intervals, *times, *places, *biases, half_life_us, divisor
    )
    mixed: Tensor = out
    return mixed


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in (torch.float32, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            "the Triton kernel of interval_attention takes q, k and v all in float32 or all in bfloat16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}; cast them or ask for impl = 'reference'"
        )
    if not 0 < q.shape[2] <= LARGEST_HEAD:
        raise ValueError(
            f"the Triton kernel of interval_attention takes head dims of 1 to {LARGEST_HEAD}, got q {tuple(q.shape)}; "
            "ask for impl = 'reference'"
        )
    if max(q.shape[0], k.shape[0]) > _LARGEST or q.shape[1] * q.shape[2] > _LARGEST_STRIDE:
        raise ValueError(
            f"the Triton kernel of interval_attention numbers queries and keys by 32 bits and takes heads * head dim up "
            f"to {_LARGEST_STRIDE}, got q {tuple(q.shape)}, k {tuple(k.shape)}"
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's tensors as the kernels name them."""

    q: Tensor
    k: Tensor
    v: Tensor
    pointers: dict[str, Tensor | None]
    numbers: dict[str, int | float]
    weights: int
    divisor: float

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def key(self) -> tuple[torch.dtype, int, int]:
        """What blocks are chosen by."""
        return self.dtype, block_of(self.q.shape[2]), self.weights

    @property
    def grad_scale(self) -> float:
        return 1.0 / (math.sqrt(self.q.shape[2]) * self.divisor)

    def launch(self, kernel: Any, grid: Any, *, options: dict[str, int] | None = None, **more: Any) -> None:
        """Launch a kernel with those of the call's arguments that it has, and more; `options`: num_warps and the like."""
        head = {"WEIGHTS": self.weights, "HEAD": self.q.shape[2], "BLOCK_K": block_of(self.q.shape[2])}
        given = {**self.pointers, **self.numbers, **head, **more, **dict.fromkeys(absent(self.weights))}
        names = kernel.arg_names
        with _on(self.q):
            kernel[grid](**{name: given[name] for name in names if name in given}, **(options or {}))


def _call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _Call:
    """Return a call of the arguments that both operators share, from q on."""
    lo, hi, itself, query_time, key_time, query_place, key_place, position_bias, time_bias, half_life_us, divisor = rest
    q, k, v = (_rows(x) for x in (q, k, v))
    weights = SILU if position_bias is not None else DECAY if query_time is not None else SOFTMAX
    # softmax is computed in powers of two
    scale = (1.0 if weights == SILU else math.log2(math.e)) / math.sqrt(q.shape[2])
    strides = {
        f"{n}_{dim}": x.stride(i) for n, x in (("q", q), ("k", k), ("v", v)) for i, dim in enumerate(("row", "head"))
    }
    pointers = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "lo_ptr": lo,
        "hi_ptr": hi,
        "itself_ptr": itself,
        "query_time_ptr": query_time,
        "key_time_ptr": key_time,
        "query_place_ptr": query_place,
        "key_place_ptr": key_place,
        "position_bias_ptr": None if position_bias is None else position_bias.float().t().contiguous(),
        "time_bias_ptr": None if time_bias is None else time_bias.float().t().contiguous(),
    }
    numbers = {
        "num_queries": q.shape[0],
        "num_keys": k.shape[0],
        "scale": scale,
        "rate": 1.0 / half_life_us,
        **strides,
    }
    return _Call(q, k, v, pointers, numbers, weights, divisor)


def _rows(x: Tensor) -> Tensor:
    """Return x [rows, H, K] with the head dim's entries next to each other; a part of a wider matrix stays as it is."""
    near = x.stride(2) == 1 or x.shape[2] == 1
    return x if near and 0 <= x.stride(0) <= _LARGEST_STRIDE and x.stride(1) >= 0 else x.contiguous()


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@torch.library.custom_op("gr::interval_attention", mutates_args=(), schema=f"({_COMMON}) -> (Tensor, Tensor)")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the mixed values, [N, H, K], and the log2-sum of the weights, [H, N] fp32 (empty for SiLU)."""
    call = _call(q, k, v, *rest)
    out, lse = _forward_fake(q, k, v, *rest)
    num_queries, heads, _ = q.shape
    if out.numel():
        call.launch(
            tuned_kernel("forward", *call.key),
            lambda meta: (triton.cdiv(num_queries, meta["BLOCK_M"]), heads),
            out_ptr=out,
            lse_ptr=lse,
            value_scale=1.0 / call.divisor,
        )
    return out, lse


@_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    silu = rest[7] is not None
    out = q.new_empty(q.shape)
    return out, q.new_empty((q.shape[1], 0 if silu else q.shape[0]), dtype=torch.float32)


_GRADS = "Tensor, Tensor, Tensor, Tensor, Tensor"


@torch.library.custom_op(
    "gr::interval_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_COMMON}) -> ({_GRADS})",
)
def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and of both tables of biases (empty without them)."""
    call = _call(q, k, v, *rest)
    grad_q, grad_k, grad_v, grad_positions, grad_times = _backward_fake(grad, out, lse, q, k, v, *rest)
    num_queries, heads, _ = q.shape
    num_keys = k.shape[0]
    if num_queries == 0 or heads == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_(), grad_positions.zero_(), grad_times.zero_()
    grad = grad.contiguous()
    delta = torch.empty_like(lse)
    call.launch(
        tuned_kernel("query_grad", *call.key),
        lambda meta: (triton.cdiv(num_queries, meta["BLOCK_M"]), heads),
        out_ptr=out,
        grad_ptr=grad,
        lse_ptr=lse,
        delta_ptr=delta,
        grad_q_ptr=grad_q,
        grad_scale=call.grad_scale,
    )
    bounds, reach = _reach(call)
    call.launch(
        tuned_kernel("key_grad", *call.key),
        lambda meta: (triton.cdiv(num_keys, meta["BLOCK_N"]), heads),
        grad_ptr=grad,
        lse_ptr=lse,
        delta_ptr=delta,
        grad_k_ptr=grad_k,
        grad_v_ptr=grad_v,
        inside_ptr=bounds[2],
        outside_ptr=bounds[3],
        from_ptr=reach[0],
        to_ptr=reach[1],
        num_grains=reach.shape[1],
        grad_scale=call.grad_scale,
        value_scale=1.0 / call.divisor,
        GRAIN=GRAIN,
    )
    if call.weights == SILU:
        positions, times = _bias_grads(call, grad)
        grad_positions.copy_(positions)
        grad_times.copy_(times)
    return grad_q, grad_k, grad_v, grad_positions, grad_times


def _reach(call: _Call) -> tuple[Tensor, Tensor]:
    """Return the bounds of query grains, [4, query grains], and the reach of key grains, [2, key grains], int32."""
    bounds = torch.empty(4, triton.cdiv(call.q.shape[0], GRAIN), dtype=torch.int32, device=call.q.device)
    reach = torch.empty(2, triton.cdiv(call.k.shape[0], GRAIN), dtype=torch.int32, device=call.q.device)
    call.launch(bounds_kernel, (bounds.shape[1],), bounds_ptr=bounds, GRAIN=GRAIN)
    call.launch(
        reach_kernel,
        (reach.shape[1],),
        bounds_ptr=bounds,
        reach_ptr=reach,
        query_grains=bounds.shape[1],
        GRAIN=GRAIN,
        CHUNK=CHUNK,
    )
    return bounds, reach


def _bias_grads(call: _Call, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both tables, [B, H] fp32: every query tile's own part, summed in a fixed order."""
    (config,) = configs("bias_grad", *call.key)
    tiles, heads = triton.cdiv(call.q.shape[0], config.kwargs["BLOCK_M"]), call.q.shape[1]
    parts = torch.empty(tiles, heads, 2, NUM_BUCKETS, dtype=torch.float32, device=grad.device)
    call.launch(
        bias_grad_kernel,
        (tiles, heads),
        grad_ptr=grad,
        grad_bias_ptr=parts,
        grad_scale=1.0 / call.divisor,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        BLOCK_M=config.kwargs["BLOCK_M"],
        BLOCK_N=config.kwargs["BLOCK_N"],
    )
    positions, times = parts.sum(dim=0).unbind(dim=1)
    return positions.t(), times.t()


@_backward.register_fake
def _backward_fake(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    shape = (0,) if rest[7] is None else rest[7].shape
    tables = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *tables)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.half_life_us, ctx.divisor = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(value=False)


def _grad(ctx: Any, grad: Tensor | None, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    if grad is None:
        return (None,) * (len(tensors) + 2)
    grad_q, grad_k, grad_v, grad_positions, grad_times = torch.ops.gr.interval_attention_backward(
        grad, out, lse, *tensors, ctx.half_life_us, ctx.divisor
    )
    biases = [
        None if bias is None else found.to(bias.dtype)
        for bias, found in zip(tensors[10:], (grad_positions, grad_times), strict=True)
    ]
    return (grad_q, grad_k, grad_v, *(None,) * 7, *biases, None, None)


_forward.register_autograd(_grad, setup_context=_save)
