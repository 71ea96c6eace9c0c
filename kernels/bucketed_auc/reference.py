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

    The edge is found by one multiplication in fp64, so a logit on an edge falls to its right, and the least one below it to
    its left: where `low` is a multiple of a bin's width, nothing is added that could round.
    """
    scale = num_bins / (high - low)
    edge = low * scale
    logits = logits.double()
    place = (logits * scale).floor() - edge if edge.is_integer() else ((logits - low) * scale).floor()
    return place.clamp(0, num_bins - 1).long()


def counted_reference(
    known_NA: Tensor, supervise_N: Tensor | None, cohort_N: Tensor | None, num_cohorts: int
) -> tuple[Tensor, Tensor]:
    """Return which scores count, [N, A] bool, and the cohort of each row, [N] int64, 0 where it is outside [0, C)."""
    cohort = (
        torch.zeros(len(known_NA), dtype=torch.int64, device=known_NA.device) if cohort_N is None else cohort_N.long()
    )
    row_N = (cohort >= 0) & (cohort < num_cohorts)
    if supervise_N is not None:
        row_N = row_N & (supervise_N != 0)
    return known_NA & row_N[:, None], torch.where(row_N, cohort, 0)


def histogram_reference(
    logits_NA: Tensor,
    labels_NA: Tensor,
    known_NA: Tensor,
    num_bins: int = NUM_BINS,
    low: float = LOW,
    high: float = HIGH,
    *,
    supervise_N: Tensor | None = None,
    cohort_N: Tensor | None = None,
    num_cohorts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count positives and negatives by bin.

    Args:
        logits_NA: [N, A], float; NaN is counted nowhere.
        labels_NA: [N, A], bool.
        known_NA: [N, A], bool; scores where it is false count nowhere.
        num_bins: B.
        low: Left edge of the first bin.
        high: Right edge of the last bin.
        supervise_N: [N], bool or uint8; rows where it is 0 count nowhere. None: all count.
        cohort_N: [N], integers; rows of a cohort outside [0, C) count nowhere. None: all are of cohort 0.
        num_cohorts: C.

    Returns:
        Positives [C * A, B] int64, negatives [C * A, B] int64, logits outside [low, high) [C * A] int64.
    """
    num_groups = num_cohorts * logits_NA.shape[1]
    counted_NA, cohort_N = counted_reference(known_NA, supervise_N, cohort_N, num_cohorts)
    counted_NA = counted_NA & ~logits_NA.isnan()
    group_NA = cohort_N[:, None] * logits_NA.shape[1] + torch.arange(logits_NA.shape[1], device=logits_NA.device)
    cell_NA = (group_NA * 2 + labels_NA.long()) * num_bins + bins_reference(logits_NA, num_bins, low, high)
    counts = torch.bincount(cell_NA[counted_NA], minlength=num_groups * 2 * num_bins).view(num_groups, 2, num_bins)
    far_NA = ((logits_NA < low) | (logits_NA >= high)) & counted_NA
    return counts[:, 1], counts[:, 0], torch.bincount(group_NA[far_NA], minlength=num_groups)


def sums_reference(
    logits_NA: Tensor,
    labels_NA: Tensor,
    known_NA: Tensor,
    *,
    supervise_N: Tensor | None = None,
    cohort_N: Tensor | None = None,
    num_cohorts: int = 1,
) -> Tensor:
    """Return fp64 sums over what counts, [C * A, 4]: log loss, probability, positives, rows; see `histogram_reference`.

    A counted NaN makes its action's loss and probability NaN, and is no row.
    """
    counted_NA, cohort_N = counted_reference(known_NA, supervise_N, cohort_N, num_cohorts)
    logit, label = logits_NA.double(), labels_NA.double()
    loss_NA = -F.logsigmoid(torch.where(labels_NA, logit, -logit))  # 0 where an infinite logit is right
    number = (~logit.isnan()).double()
    parts = torch.stack([loss_NA, torch.sigmoid(logit), label * number, number], dim=-1)
    parts = torch.where(counted_NA[..., None], parts, 0.0)
    if num_cohorts == 1:
        return parts.sum(0)
    total = parts.new_zeros(num_cohorts, *parts.shape[1:])
    return total.index_add_(0, cohort_N, parts).flatten(0, 1)


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
