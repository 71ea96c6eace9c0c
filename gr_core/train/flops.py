"""Floating-point operations that a batch needs, whatever a kernel wastes: matrices and attention, by real lengths.

A multiply-add is 2 FLOP. Training costs three times the forward pass in matrices (forward, gradient of the input, gradient
of the weight) and three and a half times in attention, whose backward computes the scores again [design section 5].
A padded place, a masked score and a recomputed activation are no work, so they lower the model FLOP utilisation (MFU).
Dims: `T` tokens, `N` targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

FLOP_A_MAC = 2
MATRIX_FACTOR = 3.0
ATTENTION_FACTOR = 3.5

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFlops:
    """Training FLOP of one batch, forward and backward."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        """Matrices and attention."""
        return self.matrices + self.attention


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """What a model multiplies a token, a target and an attended pair."""

    macs_a_token: int
    """Entries of the matrices that every token passes."""
    macs_a_target: int
    """Entries of the matrices that targets alone pass: of the head and of the top block, its keys and values apart."""
    macs_a_pair: int
    """Of one query and one key in one layer: the score and the weighted value, 2 D."""
    lower_layers: int
    """Layers in which every token is a query; in the one above only targets are."""

    @classmethod
    def of(cls, model: nn.Module, *, width: int, num_layers: int) -> ModelFlops:
        """Count the entries of a model's matrices; lookups multiply nothing.

        Args:
            model: A `Recommender`, whole: before it is sharded or wrapped.
            width: D.
            num_layers: Blocks; the last one runs for targets.
        """
        token = target = 0
        top = f"blocks.{num_layers - 1}."
        for name, size in _matrices(model):
            is_below = name.startswith(("states", "blocks.")) and not name.startswith(top)
            if is_below or (name.startswith(top) and "key_value" in name):
                token += size
            else:
                target += size
        return cls(macs_a_token=token, macs_a_target=target, macs_a_pair=2 * width, lower_layers=num_layers - 1)

    def of_batch(self, lo: Array, hi: Array, targets: Array) -> BatchFlops:
        """Return the FLOP of training on a batch.

        Args:
            lo: First key of each token, [T].
            hi: One past its last key, [T]; the token attends to itself besides.
            targets: Token numbers of the targets, [N].
        """
        pairs = hi.astype(np.int64) - lo + 1
        attended = self.lower_layers * int(pairs.sum()) + int(pairs[targets].sum())
        macs = self.macs_a_token * len(pairs) + self.macs_a_target * len(targets)
        return BatchFlops(
            matrices=MATRIX_FACTOR * FLOP_A_MAC * macs,
            attention=ATTENTION_FACTOR * FLOP_A_MAC * self.macs_a_pair * attended,
        )


def _matrices(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and entries of every matrix that rows are multiplied by."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module.weight.numel()
