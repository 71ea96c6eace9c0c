"""The plan of a pack: every segment once, within the budget, no user twice in a batch, near its place in the shuffle."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.data.planning import LOOKAHEAD, PlanRules, plan


def rules(**changes: Any) -> PlanRules:
    return PlanRules(**{"token_budget": 64, **changes})


@settings(max_examples=150, deadline=None)
@given(
    segments=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=120),
    layout=st.sampled_from(["packed", "padded"]),
    grouping=st.sampled_from(["none", "sorted", "bucketed"]),
    seed=st.integers(0, 3),
)
def test_every_segment_is_in_one_batch_that_may_hold_it(
    segments: list[tuple[int, int]], layout: Any, grouping: Any, seed: int
) -> None:
    """Whole, once; the budget holds, padded or not; a user has one segment a batch."""
    user = np.asarray([one for one, _ in segments], dtype=np.int64)
    lengths = np.asarray([one for _, one in segments], dtype=np.int64)
    order, cuts = plan(lengths, user, rules(token_budget=40, layout=layout, grouping=grouping, seed=seed))

    assert sorted(order.tolist()) == list(range(len(segments)))
    assert cuts[0] == 0
    assert cuts[-1] == len(segments)
    for begin, end in itertools.pairwise(cuts.tolist()):
        batch = order[begin:end]
        assert len(batch)
        assert len(set(user[batch].tolist())) == len(batch)
        used = lengths[batch].max() * len(batch) if layout == "padded" else lengths[batch].sum()
        assert used <= 40


def test_no_segment_comes_much_before_its_turn() -> None:
    """A batch is filled from the next LOOKAHEAD of the shuffle only, and what was passed over comes first."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 5000)
    user = np.arange(5000)
    order, cuts = plan(lengths, user, rules(token_budget=640, seed=3))
    shuffle = np.random.default_rng(3).permutation(5000)
    turn = np.argsort(shuffle)[order]

    reached = np.maximum.accumulate(turn)
    assert (reached - np.arange(5000) < 2 * LOOKAHEAD).all()
    assert (np.arange(5000) - turn < 2 * LOOKAHEAD).all()
    batch = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    assert abs(np.corrcoef(batch, lengths[order])[0, 1]) < 0.05


def test_the_plan_knows_users_by_their_order_only() -> None:
    """Segments handed over bucket by bucket, in any order of buckets: the same users share the same batches."""
    rng = np.random.default_rng(1)
    user, lengths = np.sort(rng.integers(0, 200, 600)), rng.integers(1, 30, 600)
    place = np.concatenate([np.flatnonzero(user % 3 == bucket) for bucket in (2, 0, 1)])
    order, cuts = plan(lengths, user, rules())
    mixed, again = plan(lengths[place], user[place], rules())

    assert cuts.tolist() == again.tolist()
    assert order.tolist() == place[mixed].tolist()


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_user_of_many_segments_costs_no_more_than_a_batch_each(share: float) -> None:
    """As many batches as the tokens ask for, or as the user has segments."""
    count = int(2000 * share)
    user = np.concatenate([np.zeros(count, np.int64), np.arange(1, 2001 - count)])
    lengths = np.full(len(user), 8)
    _, cuts = plan(lengths, user, rules(token_budget=128))

    assert len(cuts) - 1 <= max(len(user) * 8 / 128 * 1.05, count) + 1


def test_nothing_to_plan() -> None:
    """No segment: no batch."""
    order, cuts = plan(np.zeros(0, np.int64), np.zeros(0, np.int64), rules())

    assert (order.tolist(), cuts.tolist()) == ([], [0])
