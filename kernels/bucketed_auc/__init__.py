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
from kernels.choice import Impl, choose

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

    On CUDA one fused kernel counts, without a word to the host; updates of one object belong on one stream.

    Args:
        num_actions: A.
        device: Where the counts lie.
        num_bins: B.
        low: Left edge of the first bin.
        high: Right edge of the last bin.
        num_cohorts: C; counts of (cohort, action) are row `cohort * A + action`, so one cohort's are [A, ...].
        impl: See `kernels.choice.choose`.

    Raises:
        ValueError: Fewer than one action, bin or cohort, or edges that do not rise.
    """

    def __init__(
        self,
        num_actions: int,
        device: torch.device | str = "cpu",
        num_bins: int = NUM_BINS,
        low: float = LOW,
        high: float = HIGH,
        *,
        num_cohorts: int = 1,
        impl: Impl = "auto",
    ) -> None:
        if min(num_actions, num_bins, num_cohorts) < 1 or not low < high:
            raise ValueError(
                f"need at least one action, bin and cohort, and low < high, got {num_actions} actions, {num_bins} bins over "
                f"[{low}, {high}), {num_cohorts} cohorts"
            )
        self.num_bins, self.low, self.high = num_bins, low, high
        self.num_actions, self.num_cohorts, self._impl = num_actions, num_cohorts, impl
        self.positives_AB = torch.zeros(num_cohorts * num_actions, num_bins, dtype=torch.int64, device=device)
        self.negatives_AB = torch.zeros_like(self.positives_AB)
        self.clipped_A = torch.zeros(num_cohorts * num_actions, dtype=torch.int64, device=device)
        self.sums_A4 = torch.zeros(num_cohorts * num_actions, 4, dtype=torch.float64, device=device)
        self._scratch: Tensor | None = None
        """What the Triton kernel needs from one update to the next: no counts."""

    @torch.no_grad()
    def update(
        self,
        logits_NA: Tensor,
        labels_NA: Tensor,
        known_NA: Tensor,
        supervise_N: Tensor | None = None,
        cohort_N: Tensor | None = None,
    ) -> None:
        """Count rows that are known and supervised; a logit that is no number makes its action's sums NaN, no more.

        Args:
            logits_NA: [N, A], float (fp32 or bf16 for the Triton kernel).
            labels_NA: [N, A], bool.
            known_NA: [N, A], bool.
            supervise_N: [N], bool or uint8: rows that count where it is not 0; None: all.
            cohort_N: [N], int32: cohort of each row, which counts nowhere outside [0, C); None: 0.

        Raises:
            ValueError: Shapes or dtypes that do not fit; the Triton kernel cannot take these logits or bins.
            RuntimeError: The Triton kernel cannot run here.
        """
        self.check(logits_NA, labels_NA, known_NA, supervise_N, cohort_N)
        if choose("bucketed_auc", self._impl, logits_NA) == "triton":
            self._update_triton(logits_NA, labels_NA, known_NA, supervise_N, cohort_N)
            return
        self.add_counts(logits_NA, labels_NA, known_NA, supervise_N, cohort_N)
        self.add_sums(logits_NA, labels_NA, known_NA, supervise_N, cohort_N)

    def add_counts(
        self,
        logits_NA: Tensor,
        labels_NA: Tensor,
        known_NA: Tensor,
        supervise_N: Tensor | None = None,
        cohort_N: Tensor | None = None,
    ) -> None:
        """Add the reference's half of `update` that is integers, so that the order and grouping of rows change nothing."""
        pos, neg, clipped = histogram_reference(
            logits_NA,
            labels_NA,
            known_NA,
            *(self.num_bins, self.low, self.high),
            supervise_N=supervise_N,
            cohort_N=cohort_N,
            num_cohorts=self.num_cohorts,
        )
        self.positives_AB += pos
        self.negatives_AB += neg
        self.clipped_A += clipped

    def add_sums(
        self,
        logits_NA: Tensor,
        labels_NA: Tensor,
        known_NA: Tensor,
        supervise_N: Tensor | None = None,
        cohort_N: Tensor | None = None,
    ) -> None:
        """Add the reference's other half of `update`, the fp64 sums."""
        self.sums_A4 += sums_reference(
            logits_NA,
            labels_NA,
            known_NA,
            supervise_N=supervise_N,
            cohort_N=cohort_N,
            num_cohorts=self.num_cohorts,
        )

    def check(
        self,
        logits_NA: Tensor,
        labels_NA: Tensor,
        known_NA: Tensor,
        supervise_N: Tensor | None = None,
        cohort_N: Tensor | None = None,
    ) -> None:
        """Refuse what `update` cannot count, by ValueError."""
        if not logits_NA.shape == labels_NA.shape == known_NA.shape or logits_NA.shape[1:] != (self.num_actions,):
            raise ValueError(
                f"logits, labels and known must be [N, {self.num_actions}], got {tuple(logits_NA.shape)}, "
                f"{tuple(labels_NA.shape)}, {tuple(known_NA.shape)}"
            )
        if not logits_NA.is_floating_point() or not labels_NA.dtype == known_NA.dtype == torch.bool:
            raise ValueError(
                f"logits must be float, labels and known bool, got {logits_NA.dtype}, {labels_NA.dtype}, {known_NA.dtype}"
            )
        allowed = {"supervise": (supervise_N, (torch.bool, torch.uint8)), "cohort": (cohort_N, (torch.int32,))}
        for name, (values_N, dtypes) in allowed.items():
            if values_N is not None and (values_N.shape != logits_NA.shape[:1] or values_N.dtype not in dtypes):
                raise ValueError(
                    f"{name} of logits {tuple(logits_NA.shape)} must be [{len(logits_NA)}] of {dtypes}, got "
                    f"{tuple(values_N.shape)} of {values_N.dtype}"
                )

    def _update_triton(
        self,
        logits_NA: Tensor,
        labels_NA: Tensor,
        known_NA: Tensor,
        supervise_N: Tensor | None,
        cohort_N: Tensor | None,
    ) -> None:
        from kernels.bucketed_auc import triton_op

        if self._scratch is None:
            device = self.positives_AB.device
            self._scratch = triton_op.new_scratch(self.num_cohorts, self.num_actions, self.num_bins, device)
        totals = (self.positives_AB, self.negatives_AB, self.clipped_A, self.sums_A4, self._scratch)
        triton_op.bucketed_auc(
            *totals, logits_NA, labels_NA, known_NA, supervise_N, cohort_N, float(self.low), float(self.high)
        )

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

    def compute(self, cohort: int | None = None) -> list[ActionMetrics]:
        """Return the metrics of each action, of one cohort or, with None, of all rows together."""
        wanted = slice(None) if cohort is None else slice(cohort, cohort + 1)
        pos, neg, clipped, sums = (
            counts.unflatten(0, (self.num_cohorts, self.num_actions))[wanted].sum(0) for counts in self.state().values()
        )
        return [action_metrics(pos[a], neg[a], sums[a], clipped=int(clipped[a])) for a in range(self.num_actions)]


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
