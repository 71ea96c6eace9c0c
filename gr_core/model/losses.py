"""The loss: weighted BCE over known, due actions, divided by a weight known before the first backward.

Dims: `N` supervised tokens, `A` supervised actions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def token_losses(logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor, action_weights_A: Tensor) -> Tensor:
    """Return each token's loss: the sum over its known, due actions of action weight times BCE, [N] fp32.

    Args:
        logits_NA: [N, A], any float dtype; computed in fp32 or better.
        labels_NA: [N, A], bool.
        known_NA: [N, A], bool: known and due.
        action_weights_A: [A], fp32.
    """
    logits = logits_NA if logits_NA.dtype == torch.float64 else logits_NA.float()
    bce_NA = F.binary_cross_entropy_with_logits(logits, labels_NA.to(logits.dtype), reduction="none")
    return torch.where(known_NA, bce_NA * action_weights_A, 0.0).sum(dim=1)


def batch_loss(loss_N: Tensor, weight_N: Tensor, step_weight: float) -> Tensor:
    """Return a micro-batch's share of the step's loss: sum(w_t * loss_t) / step_weight, a scalar.

    Shares of all micro-batches (and ranks) add up to the step's loss, whatever the split.

    Args:
        loss_N: Losses, [N], fp32.
        weight_N: Loss weights under the chosen normalisation, [N], fp32.
        step_weight: Sum of the weights of ALL the step's micro-batches and ranks, from the pack index; above 0.
    """
    return (loss_N * weight_N).sum() / step_weight


def loss_weights(
    normalize: str, event_weight: npt.NDArray[np.float32], segment_of: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return w_t of supervised tokens, [N] fp32.

    Args:
        normalize: token (1), segment (1 / supervised tokens of its segment) or event_weight (the event's weight).
        event_weight: [N].
        segment_of: Segment number of each supervised token, [N].

    Raises:
        ValueError: Another normalisation.
    """
    if normalize == "token":
        return np.ones(len(event_weight), np.float32)
    if normalize == "segment":
        counts = np.bincount(segment_of)
        return (1.0 / counts[segment_of]).astype(np.float32)
    if normalize == "event_weight":
        return event_weight.astype(np.float32)
    raise ValueError(f"normalize must be token, segment or event_weight, got {normalize!r}")
