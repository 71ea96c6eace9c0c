"""Example 6 through the real loss code, for any split into micro-batches; unknown actions; fp32 counts."""

import math

import numpy as np
import pytest
import torch

from gr_core.model.heads import SharedBottom
from gr_core.model.inputs import count_features
from gr_core.model.losses import batch_loss, loss_weights, token_losses

SMALL = ([[1.0, 2.0, 3.0], [10.0]], [[1.0, 0.5, 1.0], [2.0]])
LARGE = ([[1.0, 2.0, 3.0], [4.0], [10.0, 5.0]], [[1.0, 0.5, 1.0], [1.0], [2.0, 1.0]])
SPLITS = [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[0, 1, 2]]]


def step_loss(losses, weights, normalize, split):
    """Return the loss and its gradient over theta of loss_t = theta * l_t, one backward a micro-batch."""
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    parts = []
    for members in split:
        segment_of = np.repeat(np.arange(len(members)), [len(losses[m]) for m in members])
        event_weight = np.concatenate([np.asarray(weights[m], np.float32) for m in members])
        weight = torch.from_numpy(loss_weights(normalize, event_weight, segment_of))
        parts.append((torch.tensor([x for m in members for x in losses[m]], dtype=torch.float64), weight))
    total = sum(float(weight.sum(dtype=torch.float64)) for _, weight in parts)
    value = 0.0
    for loss, weight in parts:
        share = batch_loss(theta * loss, weight, total)
        share.backward()
        value += float(share.detach())
    return value, float(theta.grad)


@pytest.mark.parametrize(
    ("normalize", "expected"), [("token", 16 / 4), ("segment", 12 / 2), ("event_weight", 25 / 4.5)]
)
@pytest.mark.parametrize("split", [[[0], [1]], [[0, 1]], [[1, 0]]], ids=str)
def test_example_6_two_segments(normalize, expected, split):
    """Loss and gradient are 4.0, 6.0 and 5.5556, whatever the micro-batches."""
    assert step_loss(*SMALL, normalize, split) == pytest.approx((expected, expected), rel=1e-6)


@pytest.mark.parametrize(
    ("normalize", "expected"), [("token", 25 / 6), ("segment", 27 / 6), ("event_weight", 34 / 6.5)]
)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_example_6_three_segments(normalize, expected, split):
    """Loss and gradient are 4.1667, 4.5 and 5.2308, whatever the micro-batches."""
    assert step_loss(*LARGE, normalize, split) == pytest.approx((expected, expected), rel=1e-6)


def test_f7_accumulation_is_no_mean_of_means():
    """X = [1, 2, 3] and [10] with loss mean(w * x): the gradient is 4.0, not 6.0 (case F7)."""
    assert step_loss([[1.0, 2.0, 3.0], [10.0]], [[1.0] * 3, [1.0]], "token", [[0], [1]])[1] == pytest.approx(4.0)


def test_unknown_actions_count_nowhere():
    """Example 6: 1.5 ln 2 and ln 2 over two tokens is 0.866434; a token of unknown actions only has loss 0."""
    labels = torch.tensor([[True, False], [False, True], [True, True]])
    known = torch.tensor([[True, True], [True, False], [False, False]])

    loss = token_losses(torch.zeros(3, 2), labels, known, torch.tensor([1.0, 0.5]))

    assert loss.tolist() == pytest.approx([1.5 * math.log(2), math.log(2), 0.0])
    assert float(batch_loss(loss[:2], torch.ones(2), 2.0)) == pytest.approx(0.866434, abs=1e-6)


def test_f24_counts_stay_exact_under_autocast(tokens):
    """5,001 loss tokens, exact in fp32 only, under bf16 autocast (case F24): so is the denominator; losses are fp32."""
    head = SharedBottom(tokens.MODEL, 2)
    inputs = [torch.randn(5001, width) for width in (16, 16, 16, count_features(tokens.MODEL, 2))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(*inputs)
        losses = token_losses(logits, torch.ones(5001, 2).bool(), torch.ones(5001, 2).bool(), torch.ones(2))
        weight = torch.from_numpy(loss_weights("token", np.ones(5001, np.float32), np.zeros(5001, np.int64)))
        mean = batch_loss(losses, weight, float(weight.sum()))

    assert weight.dtype == logits.dtype == losses.dtype == mean.dtype == torch.float32
    assert float(weight.sum()) == 5001.0
    assert float(mean.detach()) == pytest.approx(float(losses.detach().double().mean()), rel=1e-5)
