"""In-training metrics on the device: 8192 logit bins over [-16, 16) an action, and fp64 sums for NE and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.bucketed_auc.reference import (
    HIGH,
    LOW,
    NUM_BINS,
    auc_reference,
    bins_reference,
    histogram_reference,
    sums_reference,
)

__all__ = ["ActionMetrics", "BucketedAUC", "action_metrics", "bins_reference", "sums_reference"]


@dataclass(frozen=True)
class ActionMetrics:
    """What one action's histogram says; None where it is undefined (one class only, or no rows)."""

    auc: float | None
    certificate: float | None
    """Most that `auc` can differ from the exact AUC."""
    ne: float | None
    """Log loss over the entropy of the same rows' base rate."""
    calibration: float | None
    """Sum of probabilities over sum of labels."""
    count: int
    positives: int
    clipped: int
    """Logits outside the bins' range, counted in the first or last bin."""


class BucketedAUC:
    """Accumulates histograms; merging equals one pass over all rows.

    Args:
        num_actions: A.
        device: Where the counts lie.
        num_bins: B.
        low: Left edge of the first bin.
        high: Right edge of the last bin.
    """

    def __init__(
        self,
        num_actions: int,
        device: torch.device | str = "cpu",
        num_bins: int = NUM_BINS,
        low: float = LOW,
        high: float = HIGH,
    ) -> None:
        self.num_bins, self.low, self.high = num_bins, low, high
        self.positives_AB = torch.zeros(num_actions, num_bins, dtype=torch.int64, device=device)
        self.negatives_AB = torch.zeros_like(self.positives_AB)
        self.clipped_A = torch.zeros(num_actions, dtype=torch.int64, device=device)
        self.sums_A4 = torch.zeros(num_actions, 4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> None:
        """Count rows: logits [N, A] float, labels [N, A] bool, known [N, A] bool.

        Raises:
            ValueError: The three shapes differ, or A is another than at construction.
        """
        if not logits_NA.shape == labels_NA.shape == known_NA.shape or logits_NA.shape[1] != len(self.clipped_A):
            raise ValueError(
                f"logits, labels and known must be [N, {len(self.clipped_A)}], got {tuple(logits_NA.shape)}, "
                f"{tuple(labels_NA.shape)}, {tuple(known_NA.shape)}"
            )
        pos, neg, clipped = histogram_reference(logits_NA, labels_NA, known_NA, self.num_bins, self.low, self.high)
        self.positives_AB += pos
        self.negatives_AB += neg
        self.clipped_A += clipped
        self.sums_A4 += sums_reference(logits_NA, labels_NA, known_NA)

    def merge(self, other: BucketedAUC) -> None:
        """Add another shard's counts (never average shards' AUCs)."""
        self.positives_AB += other.positives_AB
        self.negatives_AB += other.negatives_AB
        self.clipped_A += other.clipped_A
        self.sums_A4 += other.sums_A4

    def state(self) -> dict[str, Tensor]:
        """Return all that was counted, by name: views."""
        return {name: getattr(self, name) for name in ("positives_AB", "negatives_AB", "clipped_A", "sums_A4")}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the counts that `state` returned."""
        for name, counts in self.state().items():
            counts.copy_(state[name])

    def compute(self) -> list[ActionMetrics]:
        """Return the metrics of each action."""
        return [
            action_metrics(self.positives_AB[a], self.negatives_AB[a], self.sums_A4[a], clipped=int(self.clipped_A[a]))
            for a in range(len(self.clipped_A))
        ]


def action_metrics(positives_B: Tensor, negatives_B: Tensor, sums_4: Tensor, *, clipped: int = 0) -> ActionMetrics:
    """Return the metrics of one action from its histogram, [B] twice, and its sums as `sums_reference` has them, [4]."""
    auc, certificate = auc_reference(positives_B, negatives_B)
    loss, probability, positives, count = sums_4.tolist()
    rate = positives / count if count else 0.0
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0
    return ActionMetrics(
        auc=auc,
        certificate=certificate,
        ne=loss / count / entropy if entropy else None,
        calibration=probability / positives if positives else None,
        count=round(count),
        positives=round(positives),
        clipped=clipped,
    )
