"""AUC from a histogram of logits, with a bound on its error, and the sums behind NE and calibration.

Dims: `N` rows, `A` actions, `B` bins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 8192
LOW = -16.0
HIGH = 16.0


def bins_reference(logits: Tensor, num_bins: int = NUM_BINS, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return the bin of each logit, int64; values outside [low, high) go to the first or last bin.

    The edge is found by one multiplication in fp64, so a logit on an edge falls to its right.
    """
    scaled = (logits.double() - low) * (num_bins / (high - low))
    return scaled.floor().clamp(0, num_bins - 1).long()


def histogram_reference(
    logits_NA: Tensor,
    labels_NA: Tensor,
    known_NA: Tensor,
    num_bins: int = NUM_BINS,
    low: float = LOW,
    high: float = HIGH,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count positives and negatives by bin.

    Args:
        logits_NA: [N, A], float.
        labels_NA: [N, A], bool.
        known_NA: [N, A], bool; rows that are false count nowhere.
        num_bins: B.
        low: Left edge of the first bin.
        high: Right edge of the last bin.

    Returns:
        Positives [A, B] int64, negatives [A, B] int64, logits outside [low, high) [A] int64.
    """
    num_actions = logits_NA.shape[1]
    action_NA = torch.arange(num_actions, device=logits_NA.device).expand_as(logits_NA)
    cell_NA = (action_NA * 2 + labels_NA.long()) * num_bins + bins_reference(logits_NA, num_bins, low, high)
    counts = torch.bincount(cell_NA[known_NA], minlength=num_actions * 2 * num_bins).view(num_actions, 2, num_bins)
    clipped_A = (((logits_NA < low) | (logits_NA >= high)) & known_NA).sum(0)
    return counts[:, 1], counts[:, 0], clipped_A


def sums_reference(logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> Tensor:
    """Return fp64 sums over known rows, [A, 4]: log loss, probability, positives, rows."""
    logit = logits_NA.double()
    label = labels_NA.double()
    loss_NA = F.binary_cross_entropy_with_logits(logit, label, reduction="none")
    one = torch.ones_like(logit)
    parts = torch.stack([loss_NA, torch.sigmoid(logit), label, one], dim=-1)
    return torch.where(known_NA[..., None], parts, 0.0).sum(0)


def auc_reference(positives_B: Tensor, negatives_B: Tensor) -> tuple[float | None, float | None]:
    """Return AUC with ties counted half, and the most it can be wrong by: 0.5 * sum(pos_b * neg_b) / (P * N).

    Both are None where one class is missing.
    """
    pos = positives_B.double()
    neg = negatives_B.double()
    pairs = float(pos.sum() * neg.sum())
    if pairs == 0:
        return None, None
    below_B = neg.cumsum(0) - neg
    wins = float((pos * (below_B + 0.5 * neg)).sum())
    return wins / pairs, 0.5 * float((pos * neg).sum()) / pairs
