"""Histogram AUC, its certificate, NE and calibration: example 5, and case G7's bins."""

import math

import pytest
import torch

from kernels.bucketed_auc import BucketedAUC, bins_reference
from kernels.choice import Impl

LABELS = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)[:, None]
P = torch.tensor([0.8, 0.6, 0.6, 0.2, 0.5, 0.4, 0.3, 0.7, 0.4, 0.1], dtype=torch.float64)[:, None]
LOGITS = torch.logit(P)
KNOWN = torch.ones_like(LABELS)


def measure(*, parts: int = 1, **bins: float) -> BucketedAUC:
    total = BucketedAUC(1, **bins)
    for logits, labels, known in zip(LOGITS.float().chunk(parts), LABELS.chunk(parts), KNOWN.chunk(parts), strict=True):
        shard = BucketedAUC(1, **bins)
        shard.update(logits, labels, known)
        total.merge(shard)
    return total


@pytest.mark.parametrize(
    ("num_bins", "low", "high", "auc", "certificate"),
    [(4, -2, 2, 31 / 42, 5 / 42), (8, -2, 2, 31 / 42, 3 / 42), (8192, -16, 16, 16 / 21, 1 / 21)],
)
def test_example_5(num_bins, low, high, auc, certificate):
    """Histogram AUC and certificate at three resolutions, as worked out."""
    got = measure(num_bins=num_bins, low=low, high=high).compute()[0]

    assert got.auc == pytest.approx(auc, abs=1e-12)
    assert got.certificate == pytest.approx(certificate, abs=1e-12)
    assert abs(got.auc - 16 / 21) <= got.certificate


def test_example_5_sums():
    """NE over the evaluated set's base rate, and calibration 23/15."""
    got = measure().compute()[0]

    assert got.ne == pytest.approx(0.926503, abs=1e-6)
    assert got.calibration == pytest.approx(23 / 15, abs=1e-6)
    assert (got.count, got.positives, got.clipped) == (10, 3, 0)


@pytest.mark.parametrize("parts", [2, 5])
def test_merged_shards_equal_one_pass(parts):
    """Merging histograms gives the AUC of all rows, never a mean of shards (case G13); fp64 sums agree to rounding."""
    for merged, whole in zip(measure(parts=parts).compute(), measure().compute(), strict=True):
        assert (merged.auc, merged.certificate, merged.count) == (whole.auc, whole.certificate, whole.count)
        assert (merged.ne, merged.calibration) == pytest.approx((whole.ne, whole.calibration), rel=1e-12)


def test_g7_bins():
    """-3.905 and -3.901 fall into bins 3096 and 3097, and fifteen logits near 98 are clipped into the last."""
    assert bins_reference(torch.tensor([-3.905, -3.901])).tolist() == [3096, 3097]
    close = BucketedAUC(1)
    close.update(torch.tensor([[-3.905], [-3.901]]), torch.tensor([[False], [True]]), torch.ones(2, 1).bool())
    assert close.compute()[0].auc == 1.0

    far = BucketedAUC(1)
    far.update(98 + torch.rand(15, 1), torch.arange(15)[:, None] % 2 == 0, torch.ones(15, 1).bool())
    assert far.compute()[0].clipped == 15
    assert int(far.positives_AB[0, -1] + far.negatives_AB[0, -1]) == 15


def test_unknown_rows_count_nowhere_and_one_class_is_undefined():
    """A row whose label is not known changes nothing; one class only gives None, not 0.5 or NaN (case G5)."""
    metrics = BucketedAUC(2)
    known = torch.tensor([[True, False], [True, False]])
    metrics.update(torch.tensor([[1.0, math.inf], [2.0, 0.0]]), torch.tensor([[True, True], [True, False]]), known)
    first, second = metrics.compute()

    assert (first.auc, first.ne, first.count, first.positives) == (None, None, 2, 2)
    assert (second.auc, second.calibration, second.count) == (None, None, 0)


def test_shapes_that_do_not_fit_are_named():
    """The three shapes are in the message."""
    with pytest.raises(ValueError, match=r"\[N, 2\]"):
        BucketedAUC(2).update(LOGITS, LABELS, KNOWN)
    for wrong in ({"num_actions": 0}, {"num_bins": 0}, {"num_cohorts": 0}, {"low": 1.0, "high": 1.0}):
        with pytest.raises(ValueError, match="at least one action, bin and cohort"):
            BucketedAUC(**{"num_actions": 1} | wrong)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_an_infinite_logit_that_is_right_has_no_loss(impl: Impl) -> None:
    """Log loss of certainty that came true is 0; of one that did not, infinite; never NaN."""
    metrics = BucketedAUC(2, impl=impl)
    inf = float("inf")
    logits = torch.tensor([[inf, inf], [-inf, 0.0]])
    labels = torch.tensor([[True, False], [False, True]])

    metrics.update(logits, labels, torch.ones(2, 2, dtype=torch.bool))

    assert metrics.sums_A4[0].tolist() == [0.0, 1.0, 1.0, 2.0]
    assert float(metrics.sums_A4[1, 0]) == inf
