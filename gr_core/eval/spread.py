"""How far AUC and NE of one scoring are from those of other users: standard errors over users, in closed form.

Events of one user are alike, so users and not events are what was sampled. Each metric is written as a mean of one
influence a user (AUC after DeLong with clusters: Obuchowski, Biometrics 1997; NE by its derivatives), whose spread is
the error. One sort, no resampling. N is the number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gr_core.eval.metrics import Array, auc, entropy, losses

KEYS = ("auc", "ne")


def standard_errors(labels: Array, logits: Array, users: Sequence[Any] | Array) -> dict[str, float | None]:
    """Return the standard errors of AUC and NE.

    Args:
        labels: 0 or 1 [N].
        logits: Scores [N].
        users: User of each example [N].

    Returns:
        {"auc", "ne"}; None with one class only, fewer than two users or a score that is not finite.
    """
    y = (np.asarray(labels) != 0).astype(np.float64)
    scores = np.asarray(logits, np.float32)
    _, owner = np.unique(np.asarray(users), return_inverse=True)
    count, positives = y.size, int(y.sum())
    num_users = int(owner.max()) + 1 if count else 0
    if num_users < 2 or positives in (0, count) or not np.isfinite(scores).all():
        return dict.fromkeys(KEYS)
    return {"auc": _spread(_auc_influences(y, scores), owner), "ne": _spread(_ne_influences(y, scores), owner)}


def auc_difference_error(labels: Array, a: Array, b: Array, users: Sequence[Any] | Array) -> float | None:
    """Return the standard error of AUC(b) - AUC(a), two models' scores of the same examples.

    Args:
        labels: 0 or 1 [N].
        a: One model's scores [N].
        b: The other's [N].
        users: User of each example [N].

    Returns:
        The error; None where `standard_errors` has none.
    """
    y = (np.asarray(labels) != 0).astype(np.float64)
    ours, theirs = (np.asarray(scores, np.float32) for scores in (a, b))
    _, owner = np.unique(np.asarray(users), return_inverse=True)
    is_finite = np.isfinite(ours).all() and np.isfinite(theirs).all()
    if not y.size or owner.max() < 1 or int(y.sum()) in (0, y.size) or not is_finite:
        return None
    return _spread(_auc_influences(y, theirs) - _auc_influences(y, ours), owner)


def _spread(influences: Array, owner: Array) -> float:
    """Return the standard error of a mean of influences, summed by user; there are two users or more."""
    of_user = np.bincount(owner, influences)
    return float(np.sqrt(of_user.size / (of_user.size - 1) * np.square(of_user).sum()))


def _auc_influences(y: Array, scores: Array) -> Array:
    """Return what each example adds to the AUC's deviation, float64 [N]; both classes are there."""
    is_positive = y != 0
    pos, neg = np.sort(scores[is_positive]), np.sort(scores[~is_positive])
    area = auc(y, scores)
    rank = np.where(is_positive, _share_below(neg, scores), 1.0 - _share_below(pos, scores))
    return np.asarray((rank - area) / np.where(is_positive, pos.size, neg.size))


def _share_below(others: Array, scores: Array) -> Array:
    """Return the share of sorted `others` below each score, ties half."""
    left, right = (np.searchsorted(others, scores, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / (2.0 * others.size))


def _ne_influences(y: Array, scores: Array) -> Array:
    """Return what each example adds to NE's deviation, float64 [N]: that of the loss, less that of the base rate."""
    rate, each = y.mean(), losses(y, scores)
    base = entropy(float(y.sum()), float(y.size))
    slope = np.log1p(-rate) - np.log(rate)  # of the entropy
    of_loss = (each - each.mean()) / base
    of_rate = each.mean() / base**2 * slope * (y - rate)
    return np.asarray((of_loss - of_rate) / y.size)
