"""Scores by action: the gate reads the logits of the action that it judges, whichever actions are supervised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gr_core.eval.gate import Scores
from gr_core.eval.scoring import Scored
from gr_core.stages import judging


def test_scores_of_an_action_are_its_own_where_one_before_it_is_not_supervised() -> None:
    """A checkpoint scores supervised actions alone; spread over all of them, a column is still found by its bit."""
    night: Any = SimpleNamespace(config={"source": {"actions": [{"name": "shown"}, {"name": "click"}]}})
    narrow = Scored(
        logits=np.array([[0.5], [2.0]], np.float32),
        labels=np.array([0, 2], np.int32),
        label_known=np.array([3, 3], np.int32),
        time=np.array([1, 1], np.int64),
        users=["a", "b"],
        event_ids=["e", "e"],
        actions=["click"],
        action_bits=[1],
        digest="d",
    )

    wide = judging.by_action(night, narrow)

    assert wide.logits.tolist() == [[0, 0.5], [0, 2.0]]
    for scored in (narrow, wide):
        found = Scores.of(scored, 1)
        assert (found.logits.tolist(), found.labels.tolist()) == ([0.5, 2.0], [0, 1])
