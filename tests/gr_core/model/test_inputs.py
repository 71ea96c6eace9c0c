"""Inputs of a batch against plain loops: states, gaps, counts, labels."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from gr_core.model.embeddings import RowMap
from gr_core.model.inputs import SHORT_WINDOW, InputBuilder, count_features
from gr_core.model.weighting import Weighting


def test_states_tell_set_unset_and_unknown_of_history_and_nothing_of_targets(tokens):
    """Per action one of three columns is 1 on history; on a target only the marker is."""
    user = tokens.random_user("a", 6, 2, seed=0)
    states = tokens.Net().builder.build(tokens.make_batch([user])).states.numpy()

    for token in range(6):
        for bit in range(3):
            known, set_ = user.known[token] >> bit & 1, user.actions[token] >> bit & 1
            expected = [known and set_, known and not set_, not known]
            assert states[token, 3 * bit : 3 * bit + 3].tolist() == [float(bool(x)) for x in expected]
    assert states[:, -1].tolist() == [0] * 6 + [1] * 2
    assert not states[6:, :-1].any()


def test_gaps_are_log_buckets_since_what_was_seen_before(tokens):
    """History counts from the token before it, a target from the newest history it sees; 0 where there is none."""
    user = tokens.random_user("a", 4, 3, seed=1)
    times = np.array([100, 101, 200, 10_000, 100, 150, 50_000]) * tokens.US
    user = dataclasses.replace(user, time=times)

    gaps = tokens.Net().builder.build(tokens.make_batch([user, user])).gaps.tolist()

    def bucket(seconds):
        return 1 + int(2 * math.log2(1 + seconds))

    expected = [0, bucket(1), bucket(99), bucket(9800), 0, bucket(49), bucket(40_000)]
    assert gaps == expected * 2


def test_counts_equal_a_loop(tokens, users):
    """Known and set actions over all visible history, its newest tokens, and tokens of equal item or kind."""
    limited = [dataclasses.replace(user, max_history=30) for user in users]
    inputs = tokens.Net().builder.build(tokens.make_batch(limited))
    rows = []
    for user in limited:
        columns = user.columns()
        for t in np.flatnonzero(user.supervise):
            seen = np.arange(columns["lo"][t], columns["hi"][t])
            groups = [seen, seen[-SHORT_WINDOW:]]
            for name in ("item_id", "kind"):
                same = seen[user.rows[name][seen] == user.rows[name][t]]
                groups.append(same if user.rows[name][t] > 2 else same[:0])
            pairs = [
                [
                    (int((user.known[g] >> b & 1).sum()), int(((user.known[g] & user.actions[g]) >> b & 1).sum()))
                    for b in (0, 1)
                ]
                for g in groups
            ]
            rows.append(
                [
                    value
                    for pair in pairs
                    for value in (
                        *(math.log1p(n) for n, _ in pair),
                        *(math.log1p(c) for _, c in pair),
                        *(c / (n + 3) for n, c in pair),
                    )
                ]
            )

    assert inputs.counts.shape[1] == count_features(tokens.MODEL, 2)
    assert torch.allclose(inputs.counts, torch.tensor(rows), atol=1e-6)


def test_counts_can_be_switched_off(tokens, users):
    """With history_counts = false there are none, and the model still runs."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, history_counts=False))

    assert net.builder.build(tokens.make_batch(users)).counts.shape[1] == 0
    assert bool(torch.isfinite(net.logits(users)).all())


def test_labels_are_the_supervised_bits(tokens):
    """Labels and their known mask keep the supervised actions in bit order; hours and weekdays are UTC."""
    user = tokens.random_user("a", 0, 2, seed=0)
    user = dataclasses.replace(
        user,
        labels=np.array([0b100, 0b001]),
        label_known=np.array([0b111, 0b001]),
        time=np.array([3 * 3600, (24 * 4 + 23) * 3600]) * tokens.US,
    )
    builder = InputBuilder(tokens.MODEL, 3, 0b101, RowMap(tokens.table_specs()))

    inputs = builder.build(tokens.make_batch([user]))

    assert inputs.labels.tolist() == [[False, True], [True, False]]
    assert inputs.known.tolist() == [[True, True], [True, False]]
    assert (inputs.hours.tolist(), inputs.weekdays.tolist()) == ([3, 23], [0, 4])


def test_another_normalisation_is_refused(tokens, users):
    """A normalisation that does not exist is an error by name."""
    builder = InputBuilder(tokens.MODEL, 3, 0b11, RowMap(tokens.table_specs()), weighting=Weighting(normalize="mean"))
    with pytest.raises(ValueError, match="normalize"):
        builder.build(tokens.make_batch(users))
