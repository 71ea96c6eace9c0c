"""Interval attention: each query attends to a run of keys [lo, hi) of its segment and to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.choice import Impl, choose
from kernels.interval_attention.reference import interval_attention_reference, interval_mask
from kernels.interval_attention.weighting import NUM_BUCKETS, Decay, Silu

__all__ = ["Decay", "Silu", "interval_attention", "interval_attention_reference", "interval_mask"]


def interval_attention(
    q_NHK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    lo_N: Tensor,
    hi_N: Tensor,
    itself_N: Tensor,
    *,
    weighting: Decay | Silu | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend to keys [lo, hi) and to the token itself, by softmax(q . k / sqrt(K)) or as `weighting` says.

    Differentiable by q, k, v and the biases of `Silu`. The kernels take time by the keys between the smallest lo and the
    largest hi of queries that are next to each other, so queries belong in the order of their keys.

    Args:
        q_NHK: Queries, [N, H, K], float; the kernels take fp32 and bf16 and head dims up to 128.
        k_THK: Keys, [T, H, K], q's dtype.
        v_THK: Values, [T, H, K], q's dtype.
        lo_N: First key of each query, [N], int, from 0.
        hi_N: One past the last key of each query, [N], int, at most T. The three are checked on the CPU alone: a check on
            a device would wait for it. There, what lies outside the keys makes the kernels' results wrong.
        itself_N: The query's own place among the keys, [N], int, in [0, T).
        weighting: Time decay, or HSTU's pointwise weights; None: softmax.
        impl: "reference", "triton", or "auto": Triton on CUDA, the reference elsewhere.

    Returns:
        [N, H, K], in q's dtype; computed in fp32.

    Raises:
        ValueError: Shapes that do not belong together (both are in the message), or what the kernels do not take.
        RuntimeError: Triton cannot run where the tensors are; see `kernels.choice`.
    """
    if k_THK.shape != v_THK.shape or q_NHK.shape[1:] != k_THK.shape[1:] or q_NHK.dim() != 3 or not q_NHK.shape[2]:
        raise ValueError(
            f"q, k and v must be [N, H, K], [T, H, K] and [T, H, K], with K from 1, got q {tuple(q_NHK.shape)}, "
            f"k {tuple(k_THK.shape)}, v {tuple(v_THK.shape)}"
        )
    for name, index_N, largest in (
        ("lo", lo_N, None),
        ("hi", hi_N, len(k_THK)),
        ("itself", itself_N, len(k_THK) - 1),
    ):
        _check_index(name, index_N, q_NHK, largest)
    if weighting is not None:
        _check_weighting(weighting, q_NHK, k_THK)
    if choose("interval_attention", impl, q_NHK) == "triton":
        # imported here: Triton is not on every machine, and its import takes a while
        from kernels.interval_attention.triton_op import interval_attention_triton

        return interval_attention_triton(q_NHK, k_THK, v_THK, lo_N, hi_N, itself_N, weighting)
    bias = None if weighting is None else weighting.bias()
    divisor = weighting.divisor if isinstance(weighting, Silu) else None
    return interval_attention_reference(q_NHK, k_THK, v_THK, lo_N, hi_N, itself_N, bias=bias, divisor=divisor)


def _check_index(name: str, index_N: Tensor, q_NHK: Tensor, largest: int | None) -> None:
    """Refuse other shapes and dtypes, and on the CPU, outside a compiled graph, numbers below 0 or above the largest."""
    if index_N.shape != q_NHK.shape[:1] or index_N.is_floating_point() or index_N.dtype == torch.bool:
        raise ValueError(
            f"{name} must be one int a query, got {tuple(index_N.shape)} of {index_N.dtype} for q {tuple(q_NHK.shape)}"
        )
    known = type(index_N) is Tensor and index_N.device.type == "cpu"  # a fake one has no values
    if not known or torch.compiler.is_compiling() or not len(index_N):
        return
    low, high = (int(end) for end in index_N.aminmax())
    if low < 0 or (largest is not None and high > largest):
        above = "" if largest is None else f" to {largest}"
        raise ValueError(f"{name} must be from 0{above}, got {low} to {high}")


def _check_weighting(weighting: Decay | Silu, q_NHK: Tensor, k_THK: Tensor) -> None:
    lines = {"query_time": (weighting.query_time, q_NHK), "key_time": (weighting.key_time, k_THK)}
    if isinstance(weighting, Silu):
        lines |= {
            "query_position": (weighting.query_position, q_NHK),
            "key_position": (weighting.key_position, k_THK),
        }
        for name, bias in (("position_bias", weighting.position_bias), ("time_bias", weighting.time_bias)):
            if bias.shape != (NUM_BUCKETS, q_NHK.shape[1]) or bias.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} must be [{NUM_BUCKETS}, heads] of fp32, in which its gradient adds up, got "
                    f"{tuple(bias.shape)} of {bias.dtype} for q {tuple(q_NHK.shape)}"
                )
        if not weighting.divisor > 0:
            raise ValueError(f"divisor must be above 0, got {weighting.divisor}")
    elif not weighting.half_life_us > 0:
        raise ValueError(f"half_life_us must be above 0, got {weighting.half_life_us}")
    for name, (line, of) in lines.items():
        if line.shape != of.shape[:1]:
            raise ValueError(f"{name} must have one entry a row, got {tuple(line.shape)} for {tuple(of.shape)}")
