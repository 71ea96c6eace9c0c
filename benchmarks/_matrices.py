"""The machine's own rate of matrix products, measured beside what is compared with it."""

from __future__ import annotations

import torch


class Matrices:
    """Square matrix products with torch's threads.

    Args:
        size: Rows of each.
        repeats: Products of a call.
        device: Where.
        dtype: Of the factors.
    """

    def __init__(self, size: int, repeats: int = 4, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._a, self._b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._repeats = repeats
        self._flop = repeats * 2.0 * size**3

    def multiply(self) -> float:
        """Do the products; returns their FLOP."""
        for _ in range(self._repeats):
            torch.mm(self._a, self._b)
        if self._a.device.type == "cuda":
            torch.cuda.synchronize()
        return self._flop
