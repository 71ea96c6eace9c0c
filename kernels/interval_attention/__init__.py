"""Interval attention: each query attends to a run of keys [lo, hi) of its segment and to itself."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kernels.interval_attention.reference import interval_attention_reference, interval_mask

__all__ = ["interval_attention", "interval_attention_reference", "interval_mask"]


def interval_attention(
    q_NHK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    lo_N: Tensor,
    hi_N: Tensor,
    itself_N: Tensor,
    *,
    impl: Literal["auto", "reference"] = "auto",
) -> Tensor:
    """Attend to keys [lo, hi) and to the token itself; see `interval_attention_reference`.

    Args:
        q_NHK: Queries, [N, H, K], float.
        k_THK: Keys, [T, H, K], q's dtype.
        v_THK: Values, [T, H, K], q's dtype.
        lo_N: First key of each query, [N], int.
        hi_N: One past the last key of each query, [N], int.
        itself_N: The query's own place among the keys, [N], int.
        impl: Only the reference exists so far; "auto" takes it on every device.

    Returns:
        [N, H, K], in q's dtype.

    Raises:
        ValueError: Shapes that do not belong together; both shapes are in the message.
    """
    if k_THK.shape != v_THK.shape or q_NHK.shape[1:] != k_THK.shape[1:]:
        raise ValueError(
            f"q, k and v must share heads and head dim, and k and v all of their shape, got q {tuple(q_NHK.shape)}, "
            f"k {tuple(k_THK.shape)}, v {tuple(v_THK.shape)}"
        )
    for name, index in (("lo", lo_N), ("hi", hi_N), ("itself", itself_N)):
        if index.shape != q_NHK.shape[:1]:
            raise ValueError(f"{name} must have one entry a query, got {tuple(index.shape)} for {tuple(q_NHK.shape)}")
    if impl not in ("auto", "reference"):
        raise ValueError(f"impl must be auto or reference, got {impl!r}")
    return interval_attention_reference(q_NHK, k_THK, v_THK, lo_N, hi_N, itself_N)
