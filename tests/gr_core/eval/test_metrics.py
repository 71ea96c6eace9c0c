"""Example 5 and the cases of undefined, imprecise and wrongly averaged metrics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gr_core.eval.metrics import (
    auc,
    binary_metrics,
    calibration,
    ece,
    evaluate,
    evaluate_shards,
    gauc,
    histogram,
    log_loss,
    metric_keys,
    normalized_entropy,
    sigmoid,
)

USERS = list("AAAABBBCCC")
LABELS = np.array([1, 0, 1, 0, 0, 1, 0, 0, 0, 0])
P = np.array([0.8, 0.6, 0.6, 0.2, 0.5, 0.4, 0.3, 0.7, 0.4, 0.1])
LOGITS = np.log(P / (1 - P)).astype(np.float32)
# Reported with 15 logits near 98: fp32 keeps their order, a saturated sigmoid ties them all.
NEAR_98 = np.arange(98.0, 99.5, 0.1).astype(np.float32)


def logit(p: list[float]) -> np.ndarray:
    values = np.array(p)
    return np.log(values / (1 - values)).astype(np.float32)


def test_auc_counts_ties_half():
    """Example 5: AUC is 16/21, ties 2-3 and 6-9 counting half."""
    assert auc(LABELS, LOGITS) == pytest.approx(16 / 21, abs=1e-12)


@pytest.mark.parametrize(
    ("bins", "low", "high", "expected_auc", "certificate"),
    [(4, -2, 2, 31 / 42, 5 / 42), (8, -2, 2, 31 / 42, 3 / 42), (8192, -16, 16, 16 / 21, 1 / 21)],
)
def test_certificate_bounds_the_histogram_error(bins, low, high, expected_auc, certificate):
    """Example 5: histogram AUC and certificate in 4, 8 and 8192 bins; the error stays below the certificate."""
    counted = histogram(LABELS, LOGITS, bins, low, high)

    assert counted.auc() == pytest.approx(expected_auc, abs=1e-12)
    assert counted.certificate() == pytest.approx(certificate, abs=1e-12)
    assert abs(expected_auc - 16 / 21) <= certificate


def test_histogram_bins_are_those_of_the_example():
    """Example 5: positives and negatives per bin; values outside go to the first or last bin and are counted."""
    counted = histogram(LABELS, LOGITS, 4, -2, 2)

    assert counted.positives.tolist() == [0, 1, 1, 1]
    assert counted.negatives.tolist() == [2, 2, 3, 0]
    assert counted.clipped == 1


def test_log_loss_and_normalized_entropy():
    """Example 5: log loss 0.565968, NE 0.926503 with the evaluated set's base rate."""
    assert log_loss(LABELS, LOGITS) == pytest.approx(0.565968, abs=1e-6)
    assert normalized_entropy(LABELS, LOGITS) == pytest.approx(0.926503, abs=1e-6)


def test_calibration_is_probabilities_over_labels():
    """Example 5: 4.6 / 3."""
    assert calibration(LABELS, LOGITS) == pytest.approx(23 / 15, abs=1e-6)


@pytest.mark.parametrize(("bins", "expected"), [(10, 0.24), (5, 0.20)])
@pytest.mark.parametrize("p", [P, sigmoid(LOGITS)], ids=["given", "through logits"])
def test_ece_bins_by_exact_edges(p, bins, expected):
    """Example 5: 6/25 in ten bins, 1/5 in five, also when probabilities went through fp32 logits."""
    assert ece(LABELS, p, bins) == pytest.approx(expected, abs=1e-6)


def test_gauc_both_ways():
    """Example 5: A 7/8, B 1/2, C left out of both means."""
    assert gauc(LABELS, LOGITS, USERS) == {
        "gauc_user_mean": pytest.approx(11 / 16, abs=1e-12),
        "gauc_impression_weighted": pytest.approx(5 / 7, abs=1e-12),
        "num_users": 2,
        "num_users_undefined": 1,
    }


def test_gauc_leaves_users_of_one_class_out():
    """Case G6: user mean .6667, impression-weighted .5556; user C, without a click, is in neither."""
    found = gauc(
        np.array([1, 0, 1, 0, 0, 0, 0, 0, 0]),
        np.array([0.9, 0.1, 0.5, 0.6, 0.4, 0.7, 0.1, 0.2, 0.3]),
        list("AABBBBCCC"),
    )

    assert found["gauc_user_mean"] == pytest.approx(0.6667, abs=1e-4)
    assert found["gauc_impression_weighted"] == pytest.approx(0.5556, abs=1e-4)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_no_auc_and_no_ne(label):
    """Case G5: undefined is None with its counts, not 0.0, 0.5 or NaN."""
    found = binary_metrics(np.full(4, label), np.array([0.1, 0.2, 0.3, 0.4], np.float32))

    assert (found["auc"], found["ne"]) == (None, None)
    assert (found["count"], found["positives"]) == (4, 4 * label)
    assert found["log_loss"] is not None
    assert (found["calibration"] is None) == (label == 0)


def test_no_examples_have_no_metric():
    """Nothing evaluated gives None everywhere and zero counts."""
    found = binary_metrics(np.zeros(0), np.zeros(0, np.float32))

    assert found == dict.fromkeys(("auc", "ne", "log_loss", "calibration", "ece")) | {"count": 0, "positives": 0}
    assert gauc(np.zeros(0), np.zeros(0), [])["gauc_user_mean"] is None


def test_a_logit_that_is_not_finite_leaves_nothing_to_compare():
    """NaN never becomes a metric: all are None, and the logits are counted."""
    found = binary_metrics(np.array([1, 0]), np.array([np.nan, 0.5], np.float32))

    assert (found["auc"], found["ne"], found["non_finite"]) == (None, None, 1)


def test_close_logits_keep_their_order():
    """Case G7: -3.905 against -3.901 is AUC 1, exactly and in the bins (3096 and 3097)."""
    labels, scores = np.array([0, 1]), np.array([-3.905, -3.901], np.float32)
    counted = histogram(labels, scores)

    assert auc(labels, scores) == 1.0
    assert counted.auc() == 1.0
    assert [int(np.flatnonzero(part)[0]) for part in (counted.negatives, counted.positives)] == [3096, 3097]


def test_saturated_logits_are_sorted_not_binned():
    """Case G7: fifteen logits near 98 keep their order in the exact AUC (0.9286); the bins clip all fifteen."""
    labels = (np.arange(15) == 13).astype(int)
    counted = histogram(labels, NEAR_98)

    assert auc(labels, NEAR_98) == pytest.approx(0.9286, abs=1e-4)
    assert (counted.auc(), counted.clipped) == (0.5, 15)


@pytest.mark.parametrize(
    ("p", "expected"), [([0.25] * 4, 1.0), ([0.5] * 4, 1.2326), ([0.6, 0.2, 0.2, 0.2], 0.5247)], ids=str
)
def test_ne_uses_the_evaluated_sets_rate(p, expected):
    """Case G8: labels 1,0,0,0 give NE 1.0, 1.2326 and 0.5247; predicting the rate itself is 1."""
    assert normalized_entropy(np.array([1, 0, 0, 0]), logit(p)) == pytest.approx(expected, abs=1e-4)


def test_ne_with_another_rate_is_another_figure():
    """Case G8: p = .25 is 0.8113 with a prior of .5, which is not what we report; a shared rate cancels in a ratio."""
    labels, half = np.array([1, 0, 0, 0]), np.log(2)
    sharp, rate = logit([0.6, 0.2, 0.2, 0.2]), logit([0.25] * 4)

    assert log_loss(labels, rate) / half == pytest.approx(0.8113, abs=1e-4)
    assert normalized_entropy(labels, rate) == pytest.approx(1.0)
    ratio = normalized_entropy(labels, sharp) / normalized_entropy(labels, rate)
    assert ratio == pytest.approx(log_loss(labels, sharp) / log_loss(labels, rate))


SHARD_LABELS = np.array([1, 0, 1, 0], np.int32)
SHARD_LOGITS = logit([0.9, 0.8, 0.2, 0.1])[:, None]


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 3]], ids=["1 shard", "2 shards", "4 shards"])
def test_shards_are_merged_never_averaged(cuts):
    """Case G13: two batches of AUC 1.0 each are 0.75 together, in any number of shards, exact and binned."""
    known = np.ones(4, np.int32)
    shards = list(zip(*(np.split(part, cuts) for part in (SHARD_LABELS, known, SHARD_LOGITS)), strict=True))
    counted = [histogram(labels, logits[:, 0]) for labels, _, logits in shards]
    merged = counted[0]
    for other in counted[1:]:
        merged += other

    assert evaluate_shards(shards, ["click"], 1)["click"]["auc"] == 0.75
    assert merged.auc() == 0.75


def test_shard_mean_of_example_5_is_wrong():
    """Example 5: events 1-4 give 7/8 and 5-10 give 1/2; the merged histograms give 16/21, not 0.6875."""
    parts = [(LABELS[:4], LOGITS[:4]), (LABELS[4:], LOGITS[4:])]

    assert [auc(*part) for part in parts] == [7 / 8, 1 / 2]
    assert (histogram(*parts[0]) + histogram(*parts[1])).auc() == pytest.approx(16 / 21, abs=1e-12)


def test_evaluate_reads_bits_and_leaves_unknown_labels_out():
    """Each supervised action is measured on the rows where its label is known, by its own column of logits."""
    labels = np.array([0b001, 0b100, 0b101], np.int32)
    known = np.array([0b101, 0b100, 0b101], np.int32)
    logits = np.array([[1, 0, -1], [9, 0, 2], [0.5, 0, 3]], np.float32)
    found = evaluate(labels, known, logits, ["click", "view", "buy"], 0b101)

    assert list(found) == ["click", "buy"]
    assert (found["click"]["count"], found["click"]["positives"], found["click"]["auc"]) == (2, 2, None)
    assert (found["buy"]["count"], found["buy"]["positives"], found["buy"]["auc"]) == (3, 2, 1.0)
    assert metric_keys("holdout", found)["holdout/auc/buy"] == 1.0
    assert evaluate(labels, known, logits[:, [0, 2]], ["click", "view", "buy"], 0b101) == found
    with pytest.raises(ValueError, match="2 or 3 columns, got 1"):
        evaluate(labels, known, logits[:, :1], ["click", "view", "buy"], 0b101)


@given(st.lists(st.tuples(st.booleans(), st.integers(-40, 40)), min_size=2, max_size=60))
def test_auc_equals_the_count_over_all_pairs(rows):
    """AUC equals the plain count over all pairs, and the histogram's lies within its certificate."""
    labels = np.array([label for label, _ in rows], int)
    scores = np.array([score / 4 for _, score in rows], np.float32)
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p in scores[labels == 1].tolist()
        for n in scores[labels == 0].tolist()
    ]
    exact, counted = auc(labels, scores), histogram(labels, scores, 16, -4, 4)

    assert exact == (pytest.approx(np.mean(pairs)) if pairs else None)
    if exact is not None:
        assert abs(counted.auc() - exact) <= counted.certificate() + 1e-12
