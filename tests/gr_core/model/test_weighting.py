"""Weights of tokens: normalisation, half-life, position; their totals are what the step divides by."""

import dataclasses

import numpy as np
import pytest
import torch

from gr_core.model.embeddings import RowMap
from gr_core.model.inputs import InputBuilder
from gr_core.model.losses import batch_loss
from gr_core.model.weighting import Weighting

DAY_US = 86_400_000_000
CUTOFF = 10 * DAY_US


def segment(tokens, name, ages_days, weights, slots=None):
    """Return a user of due events alone, with ages at the cutoff and event weights."""
    user = tokens.random_user(name, 0, len(ages_days), seed=0)
    rows = {**user.rows, "surface": np.asarray(slots or [2] * len(ages_days))}
    time = CUTOFF - (np.asarray(ages_days) * DAY_US).astype(np.int64)
    return dataclasses.replace(user, rows=rows, time=time, weight=np.asarray(weights, np.float32))


def weights_of(tokens, weighting, users):
    batch = tokens.make_batch(users)
    return weighting.weights(batch, np.flatnonzero(batch.supervise.numpy())), weighting.total(batch)


def step_loss(tokens, weighting, losses, micro_batches):
    """Return loss and gradient over theta of loss_t = theta * l_t, one backward a micro-batch of segments."""
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    made = [(weights_of(tokens, weighting, users), users) for users in micro_batches]
    total = sum(weight for (_, weight), _ in made)
    value = 0.0
    for (weight, _), users in made:
        l_t = torch.tensor([x for user in users for x in losses[user.name]], dtype=torch.float64)
        share = batch_loss(theta * l_t, torch.from_numpy(weight), total)
        share.backward()
        value += float(share.detach())
    return value, float(theta.grad)


@pytest.mark.parametrize(
    ("normalize", "half_life", "expected"),
    [
        ("token", None, 16 / 4),
        ("segment", None, 12 / 2),
        ("event_weight", None, 25 / 4.5),
        # ages 0, 1, 2 days and 1 day, half-life one day: factors 1, 1/2, 1/4 and 1/2
        ("token", 1.0, (1 + 2 / 2 + 3 / 4 + 10 / 2) / (1 + 1 / 2 + 1 / 4 + 1 / 2)),
        ("segment", 1.0, ((1 + 1 + 0.75) / 3 + 5) / ((1 + 0.5 + 0.25) / 3 + 0.5)),
        ("event_weight", 1.0, (1 + 0.5 + 0.75 + 10) / (1 + 0.25 + 0.25 + 1)),
    ],
)
@pytest.mark.parametrize("split", [[[0], [1]], [[0, 1]], [[1, 0]]], ids=str)
def test_example_6_with_and_without_half_life(tokens, normalize, half_life, expected, split):
    """Loss and gradient of example 6 for any split; the half-life weights stand in the denominator too."""
    both = [segment(tokens, "s1", [0, 1, 2], [1, 0.5, 1]), segment(tokens, "s2", [1], [2])]
    losses = {"s1": [1.0, 2.0, 3.0], "s2": [10.0]}
    weighting = Weighting(normalize=normalize, half_life_days=half_life, cutoff_us=CUTOFF)

    found = step_loss(tokens, weighting, losses, [[both[i] for i in members] for members in split])

    assert found == pytest.approx((expected, expected), rel=1e-6)


def test_the_future_weighs_no_more_than_the_present(tokens):
    """An event shown after the cutoff (a wrong clock) has age 0, not a weight above 1."""
    weights, _ = weights_of(
        tokens, Weighting(half_life_days=1.0, cutoff_us=CUTOFF), [segment(tokens, "a", [-5, 0], [1, 1])]
    )

    assert weights.tolist() == [1.0, 1.0]


def test_position_weights_follow_the_feature_of_the_target(tokens):
    """The row of the position feature picks the weight, times the normalisation; the total is their sum."""
    table = np.array([1, 1, 1, 2, 0.5, 1], np.float32)
    weighting = Weighting(normalize="event_weight", position_feature="surface", position_weights=table)

    weights, total = weights_of(tokens, weighting, [segment(tokens, "a", [0] * 3, [1, 3, 1], slots=[3, 4, 5])])

    assert weights.tolist() == [2.0, 1.5, 1.0]
    assert total == 4.5


def test_inputs_carry_the_weights_and_tell_replayed_targets(tokens, users):
    """What the loss multiplies by is what the total adds up; supervise = 2 is a target that metrics leave out."""
    again = dataclasses.replace(users[4], supervise=users[4].supervise * 2)
    weighting = Weighting(half_life_days=0.1, cutoff_us=2 * 10**11)
    builder = InputBuilder(tokens.MODEL, 3, 0b11, RowMap(tokens.table_specs()), weighting=weighting)
    batch = tokens.make_batch([users[3], again])

    inputs = builder.build(batch)

    assert float(inputs.weights.double().sum()) == pytest.approx(weighting.total(batch), rel=1e-7)
    assert inputs.fresh.tolist() == [True] * 2 + [False] * 5
    assert inputs.states[-5:, -1].tolist() == [1.0] * 5
