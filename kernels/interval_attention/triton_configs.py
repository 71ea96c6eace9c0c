"""Which blocks each interval attention kernel is launched with, and so which compilations of it there are.

Every one is compiled for sm_90 by `python -m kernels.check`: none spills, and half-precision products are wgmma.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton

from kernels._triton import Variant, tuned, variants
from kernels.interval_attention.triton_backward import bias_grad_kernel, key_grad_kernel, query_grad_kernel
from kernels.interval_attention.triton_forward import forward_kernel
from kernels.interval_attention.triton_reach import bounds_kernel, reach_kernel

GRAIN = 64
"""Queries and keys of a grain, in which the reach of keys is known."""
CHUNK = 1024
"""Query grains that `reach_kernel` looks at at once."""
LARGEST_HEAD = 128
SMALLEST_BLOCK = 16
"""Head dims below are padded to it: tl.dot multiplies nothing narrower."""
SOFTMAX, DECAY, SILU = 0, 1, 2
WEIGHTS = {"softmax": SOFTMAX, "decay": DECAY, "silu": SILU}
KERNELS = {
    "forward": forward_kernel,
    "query_grad": query_grad_kernel,
    "key_grad": key_grad_kernel,
    "bias_grad": bias_grad_kernel,
}
_FLOATS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "grad_ptr", "grad_q_ptr", "grad_k_ptr", "grad_v_ptr")
_TIMES, _PLACES = ("query_time_ptr", "key_time_ptr"), ("query_place_ptr", "key_place_ptr")
_BIASES = ("position_bias_ptr", "time_bias_ptr")
_SINGLES = (*_BIASES, "lse_ptr", "delta_ptr", "grad_bias_ptr")
_NUMBERS = ("scale", "rate", "grad_scale", "value_scale")


def configs(role: str, dtype: torch.dtype, block_k: int, weights: int) -> list[Any]:
    """Return the triton.Configs that tuning chooses among; the first runs where nothing can be timed."""
    half, wide = dtype != torch.float32, block_k > 64
    if role == "bias_grad":
        found = [(64, 32, 8, 1)]
    elif not half:  # products in full fp32, not tf32: on CUDA cores, so blocks are small
        deep = 1 if role == "forward" and weights == SILU and wide else 2
        found = [(64 if role == "query_grad" else 32, 32, 8, deep)]
    elif weights == SILU:
        found = [(32 if role == "key_grad" else 64, 64 if role == "key_grad" else 32, 8 if wide else 4, 2)]
    elif role == "forward":
        found = [(128, 64, 8, 2 if wide else 3)]
        found += [] if wide and weights == DECAY else [(64, 64, 4, 2 if wide else 3)]
    elif role == "query_grad":
        found = [(64, 32, 4, 2), (64, 64, 8, 2)] if wide else [(64, 64, 4, 2)]
    else:
        found = [] if wide and weights == DECAY else [(32, 64, 4, 2)]
        found += [(64, 64, 8 if wide else 4, 2)]
    return [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in found]


@cache
def tuned_kernel(role: str, dtype: torch.dtype, block_k: int, weights: int) -> Any:
    """Return a kernel that finds its blocks at its first launch: it may run several times, for it only overwrites."""
    return tuned(configs(role, dtype, block_k, weights), key=[])(KERNELS[role])


def block_of(head_dim: int) -> int:
    """Return the power of two that a head dim is padded to."""
    return max(triton.next_power_of_2(head_dim), SMALLEST_BLOCK)


def launched() -> Iterator[Variant]:
    """Yield every compilation that may be launched; head dims of 48 and 96 stand for all between powers of two."""
    grain = {"GRAIN": GRAIN}
    whole = dict.fromkeys(("lo_ptr", "hi_ptr", "itself_ptr", "bounds_ptr"), "*i32")
    yield Variant(
        label="grains",
        kernel=bounds_kernel,
        signature={**whole, "num_queries": "i32", "num_keys": "i32"},
        constants=grain,
        num_warps=4,
        num_stages=1,
    )
    yield Variant(
        label="grains",
        kernel=reach_kernel,
        signature={"bounds_ptr": "*i32", "reach_ptr": "*i32", "num_queries": "i32", "query_grains": "i32"},
        constants={**grain, "CHUNK": CHUNK},
        num_warps=4,
        num_stages=1,
    )
    for dtype, letters in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for head in (16, 32, 64, 128, *((48, 96) if letters == "bf16" else ())):
            for name, weights in WEIGHTS.items():
                for role in KERNELS:
                    if role != "bias_grad" or weights == SILU:
                        yield from _variants(role, dtype, letters, head, name)


def _variants(role: str, dtype: torch.dtype, letters: str, head: int, name: str) -> Iterator[Variant]:
    kernel, weights, block_k = KERNELS[role], WEIGHTS[name], block_of(head)
    signature: dict[str, str] = {}
    constants: dict[str, int | None] = {"WEIGHTS": weights, "HEAD": head, "BLOCK_K": block_k}
    for parameter in kernel.arg_names:
        if parameter in absent(weights):
            constants[parameter] = None
        elif parameter == "GRAIN":
            constants[parameter] = GRAIN
        elif not parameter.isupper():
            signature[parameter] = _type(parameter, letters)
    yield from variants(
        kernel,
        configs(role, dtype, block_k, weights),
        signature,
        constants,
        label=f"{letters} K={head} {name}",
        half_dot=letters == "bf16",
        aligned=tuple(n for n in signature if n.endswith(("_ptr", "_row", "_head"))),
    )


def absent(weights: int) -> tuple[str, ...]:
    """Return the parameters that are None with these weights."""
    if weights == SILU:
        return ("lse_ptr", "delta_ptr")
    return (*_PLACES, *_BIASES) if weights == DECAY else (*_TIMES, *_PLACES, *_BIASES)


def _type(parameter: str, letters: str) -> str:
    if parameter in _NUMBERS:
        return "fp32"
    if not parameter.endswith("_ptr"):
        return "i32"
    if parameter in _FLOATS:
        return f"*{letters}"
    return "*fp32" if parameter in _SINGLES else "*i64" if parameter in _TIMES else "*i32"
