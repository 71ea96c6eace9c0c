"""Arithmetic of a training step, and the machine's own rate of it.

2 FLOP a multiply-add; three passes over matrices (forward, and two products backward), 3.5 over attention (its
backward computes the scores again); real tokens, real intervals. Lookups, norms and activations count as nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from gr_core.data.batches import Batch
from gr_core.model.inputs import count_features
from gr_core.model.settings import ModelConfig

MATRIX_PASSES, ATTENTION_PASSES = 3.0, 3.5


def step_flops(batch: Batch, config: ModelConfig, num_actions: int, num_supervised: int) -> float:
    """Return the FLOP that a training step on a batch needs.

    Args:
        batch: Its tokens.
        config: The model; the last layer runs for targets only.
        num_actions: All actions.
        num_supervised: Supervised ones.
    """
    width, hidden = config.width, round(config.feedforward_multiple * config.width)
    targets = np.flatnonzero(batch.supervise.numpy())
    keys = batch.hi.numpy().astype(np.int64) - batch.lo.numpy() + 1
    tokens, queries, lower = batch.num_tokens, len(targets), config.num_layers - 1
    per_token = 4 * width * width + 3 * width * hidden
    head_inputs = 3 * width + count_features(config, num_supervised)
    matrices = tokens * (lower * per_token + 2 * width * width + (3 * num_actions + 1) * width)
    matrices += queries * (2 * width * width + 3 * width * hidden)
    matrices += queries * (head_inputs * 2 * width + 2 * width * num_supervised)
    attention = 2 * width * (lower * int(keys.sum()) + int(keys[targets].sum()))
    return 2 * (MATRIX_PASSES * matrices + ATTENTION_PASSES * attention)


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
