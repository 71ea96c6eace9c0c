"""Standard errors over users: what resampling the users gives, without resampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gr_core.eval.metrics import auc, normalized_entropy
from gr_core.eval.progressive import next_day_errors
from gr_core.eval.spread import auc_difference_error, standard_errors


def of_users(num_users: int, each: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return labels, logits and users whose events are alike: a user's taste moves all labels, half seen by the score."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), each)
    taste = rng.normal(0, 1.5, num_users)[users]
    labels = (rng.random(users.size) < 1 / (1 + np.exp(-(taste - 1)))).astype(int)
    logits = np.round(0.5 * taste - 1 + rng.normal(0, 0.5, users.size), 1).astype(np.float32)
    return labels, logits, users


def resampled(labels: np.ndarray, logits: np.ndarray, users: np.ndarray, times: int = 400) -> dict[str, float]:
    """Return the spread of both metrics over bootstrap samples of users."""
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(users == user) for user in np.unique(users)]
    found: list[tuple[Any, Any]] = []
    for _ in range(times):
        at = np.concatenate([rows[n] for n in rng.integers(0, len(rows), len(rows))])
        found.append((auc(labels[at], logits[at]), normalized_entropy(labels[at], logits[at])))
    return dict(zip(("auc", "ne"), np.std(np.array(found, float), axis=0, ddof=1), strict=True))


def test_errors_are_those_of_a_bootstrap_over_users():
    """Within 15 % of resampling users, and well above what independent events would give."""
    labels, logits, users = of_users(150, 12, seed=1)

    found = standard_errors(labels, logits, users)
    alone = standard_errors(labels, logits, np.arange(users.size))

    assert found == pytest.approx(resampled(labels, logits, users), rel=0.15)
    assert found["auc"] > 1.3 * alone["auc"]
    assert found["ne"] > 1.3 * alone["ne"]


def test_users_may_be_named_and_come_in_any_order():
    """The order of rows and the names of users change nothing."""
    labels, logits, users = of_users(20, 5, seed=2)
    order = np.random.default_rng(0).permutation(users.size)

    named = standard_errors(labels[order], logits[order], [f"user {n}" for n in users[order]])

    assert named == pytest.approx(standard_errors(labels, logits, users))


@pytest.mark.parametrize(
    ("labels", "logits", "users"),
    [([], [], []), ([1, 1], [0.1, 0.2], [1, 2]), ([0, 1], [0.1, 0.2], [1, 1]), ([0, 1], [0.1, np.nan], [1, 2])],
    ids=["nothing", "one class", "one user", "not finite"],
)
def test_an_error_that_is_not_defined_is_none(labels, logits, users):
    """It is never 0 or NaN."""
    assert standard_errors(np.array(labels), np.array(logits, np.float32), users) == {"auc": None, "ne": None}


def test_next_day_errors_are_of_the_rows_that_next_day_metrics_count():
    """Late rows are left out, an action never supervised is not there, and wide and narrow logits are the same."""
    labels, logits, users = of_users(30, 4, seed=3)
    late = np.arange(labels.size) % 4 == 0

    class Rows:
        label_known = np.full(labels.size, 0b101, np.int32)
        time = np.where(late, 5, 20)

    narrow = Rows()
    narrow.labels, narrow.users = (labels << 2).astype(np.int32), [str(n) for n in users]
    narrow.logits = np.stack([np.zeros_like(logits), logits], axis=1)
    found = next_day_errors(narrow, {"buy": 10}, ["click", "hate", "buy"], 0b101)
    narrow.logits = np.stack([np.zeros_like(logits), np.zeros_like(logits), logits], axis=1)

    assert list(found) == ["buy"]
    assert found["buy"] == pytest.approx(standard_errors(labels[~late], logits[~late], users[~late]))
    assert next_day_errors(narrow, {"buy": 10}, ["click", "hate", "buy"], 0b101) == found


def test_the_error_of_a_difference_is_that_of_resampled_users():
    """Two models on the same events: the error of AUC(b) - AUC(a) is a bootstrap's, far below that of unpaired ones."""
    rng = np.random.default_rng(3)
    users = np.repeat(np.arange(300), rng.integers(1, 9, 300))
    truth = rng.normal(size=300)[users] + rng.normal(size=users.size)
    labels = (rng.random(users.size) < 1 / (1 + np.exp(-truth))).astype(int)
    a, b = ((truth + rng.normal(0, 0.3, users.size)).astype(np.float32) for _ in range(2))
    rows = [np.flatnonzero(users == user) for user in range(300)]
    drawn = []
    for _ in range(300):
        at = np.concatenate([rows[user] for user in rng.integers(0, 300, 300)])
        drawn.append(auc(labels[at], b[at]) - auc(labels[at], a[at]))

    found = auc_difference_error(labels, a, b, users)

    assert found == pytest.approx(np.std(drawn, ddof=1), rel=0.15)
    assert found < 0.7 * standard_errors(labels, a, users)["auc"]
    assert auc_difference_error(labels, a, a, users) == 0
    assert auc_difference_error(labels * 0, a, b, users) is auc_difference_error(labels, a, b, users * 0) is None
    assert auc_difference_error(labels, a * np.float32("nan"), b, users) is None
    assert auc_difference_error(labels[:0], a[:0], b[:0], users[:0]) is None
