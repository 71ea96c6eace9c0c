"""Metrics of binary labels against logits, in numpy: exact AUC, NE, calibration, ECE, GAUC, and mergeable histograms.

A metric that is not defined (one class, no events) is None and comes with its counts; it is never 0, 0.5 or NaN.
AUC is computed from fp32 logits by sorting, ties half. NE divides by the entropy of the evaluated set's own base
rate; lower is better. Metrics are never averaged over shards: concatenate the shards (`evaluate_shards`), or add up
`Histogram`s. N is the number of examples, A of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BINS, LOW, HIGH = 8192, -16.0, 16.0
ECE_BINS = 10
KEYS = ("auc", "ne", "log_loss", "calibration", "ece")


class ScoredRows(Protocol):
    """A model's scores of a pack's supervised tokens, as gr_core.eval.scoring returns them; N rows, W columns."""

    @property
    def logits(self) -> Array:
        """Scores, float32 [N, W], one column a supervised action."""

    @property
    def action_bits(self) -> Sequence[int]:
        """Bit number of each logit column [W]."""

    @property
    def labels(self) -> Array:
        """Label masks, int32 [N]."""

    @property
    def label_known(self) -> Array:
        """Masks of the labels that count, int32 [N]."""

    @property
    def time(self) -> Array:
        """Time shown, int64 [N], microseconds since the epoch."""

    @property
    def users(self) -> Sequence[str]:
        """User of each row [N]."""

    @property
    def digest(self) -> str:
        """Of the rows."""


def sigmoid(logits: Array) -> Array:
    """Return probabilities as float64; exact at both ends, without overflow warnings."""
    z = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def losses(labels: Array, logits: Array) -> Array:
    """Return each example's log loss (nats, float64 [N]) from its logit."""
    z = np.asarray(logits, np.float64)
    return np.asarray(np.maximum(z, 0) - z * np.asarray(labels, np.float64) + np.log1p(np.exp(-np.abs(z))))


def _counts(labels: Array) -> tuple[int, int]:
    positives = int(np.count_nonzero(labels))
    return positives, int(np.size(labels)) - positives


def auc(labels: Array, logits: Array) -> float | None:
    """Return the exact area under the ROC curve of fp32 scores, ties half; None with one class only.

    Args:
        labels: 0 or 1 [N].
        logits: Scores [N]; only their fp32 order counts.
    """
    positives, negatives = _counts(labels)
    if not positives or not negatives:
        return None
    scores = np.asarray(logits, np.float32)
    order = np.argsort(scores)
    ranked = np.asarray(labels)[order] != 0
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) != 0])
    pos = np.add.reduceat(ranked.astype(np.int64), starts)
    neg = np.diff(np.r_[starts, ranked.size]) - pos
    below = np.cumsum(neg) - neg
    return float((pos * below).sum() + 0.5 * (pos * neg).sum()) / (positives * negatives)


def log_loss(labels: Array, logits: Array) -> float | None:
    """Return the mean log loss in nats; None without examples."""
    return float(losses(labels, logits).mean()) if np.size(labels) else None


def entropy(positives: float, count: float) -> float:
    """Return the entropy (nats) of a base rate; 0 with one class only."""
    if count <= 0 or positives <= 0 or positives >= count:
        return 0.0
    rate = positives / count
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def normalized_entropy(labels: Array, logits: Array) -> float | None:
    """Return log loss over the entropy of the evaluated set's base rate; None with one class only."""
    positives, negatives = _counts(labels)
    base = entropy(positives, positives + negatives)
    return float(losses(labels, logits).mean()) / base if base else None


def calibration(labels: Array, logits: Array) -> float | None:
    """Return the sum of probabilities over the sum of labels; None without positives."""
    positives, _ = _counts(labels)
    return float(sigmoid(logits).sum()) / positives if positives else None


def ece(labels: Array, probabilities: Array, bins: int = ECE_BINS) -> float | None:
    """Return the expected calibration error over equal-width bins, left-closed, the last one closed.

    The edges are k / bins rounded once, and probabilities are compared with them in fp32: in float64 a probability
    of 0.6 that went through a logit lies below 0.6 or not by chance, and 0.6 // 0.2 is 2.

    Args:
        labels: 0 or 1 [N].
        probabilities: In [0, 1] [N].
        bins: Number of bins.

    Returns:
        sum_b |sum of probabilities - sum of labels| / N; None without examples.
    """
    p = np.asarray(probabilities, np.float64)
    if not p.size:
        return None
    edges = (np.arange(1, bins) / bins).astype(np.float32)
    place = np.searchsorted(edges, p.astype(np.float32), side="right")
    gap = np.bincount(place, p - np.asarray(labels, np.float64), minlength=bins)
    return float(np.abs(gap).sum()) / p.size


def gauc(labels: Array, logits: Array, users: Sequence[Any] | Array) -> dict[str, float | int | None]:
    """Return AUC within users, averaged both ways; users with one class only are left out of both.

    Args:
        labels: 0 or 1 [N].
        logits: Scores [N], compared in fp32.
        users: User of each example [N].

    Returns:
        gauc_user_mean, gauc_impression_weighted (None where no user has both classes), num_users (counted),
        num_users_undefined.
    """
    if not np.size(labels):
        return {"gauc_user_mean": None, "gauc_impression_weighted": None, "num_users": 0, "num_users_undefined": 0}
    _, owner = np.unique(np.asarray(users), return_inverse=True)
    scores = np.asarray(logits, np.float32)
    order = np.lexsort((scores, owner))
    owner, scores, y = owner[order], scores[order], (np.asarray(labels)[order] != 0).astype(np.int64)
    starts = np.flatnonzero(np.r_[True, (np.diff(owner) != 0) | (np.diff(scores) != 0)])
    pos = np.add.reduceat(y, starts)
    neg = np.diff(np.r_[starts, y.size]) - pos
    of_user = owner[starts]
    total_neg = np.bincount(of_user, neg)
    before = np.r_[0, np.cumsum(total_neg)[:-1]]
    below = np.cumsum(neg) - neg - before[of_user]
    wins = np.bincount(of_user, pos * below + 0.5 * pos * neg)
    pairs = np.bincount(of_user, pos) * total_neg
    shown = np.bincount(owner)
    valid = pairs > 0
    per_user = wins[valid] / pairs[valid]
    weights = shown[valid]
    return {
        "gauc_user_mean": float(per_user.mean()) if per_user.size else None,
        "gauc_impression_weighted": float((per_user * weights).sum() / weights.sum()) if per_user.size else None,
        "num_users": int(valid.sum()),
        "num_users_undefined": int((~valid).sum()),
    }


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of logits per bin and class; shards are merged with `+`, which averaging AUCs cannot replace."""

    positives: NDArray[np.int64]
    negatives: NDArray[np.int64]
    clipped: int
    """Logits outside the range; they count in the first or last bin."""

    def __add__(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets of examples."""
        return Histogram(
            self.positives + other.positives, self.negatives + other.negatives, self.clipped + other.clipped
        )

    def _pairs(self) -> int:
        return int(self.positives.sum()) * int(self.negatives.sum())

    def auc(self) -> float | None:
        """Return the AUC of the binned logits, ties half; None with one class only."""
        below = np.cumsum(self.negatives) - self.negatives
        pairs = self._pairs()
        wins = float((self.positives * below).sum()) + 0.5 * float((self.positives * self.negatives).sum())
        return wins / pairs if pairs else None

    def certificate(self) -> float | None:
        """Return the bound on |binned AUC - exact AUC|; true ties count in it although their half is exact."""
        pairs = self._pairs()
        return 0.5 * float((self.positives * self.negatives).sum()) / pairs if pairs else None


def histogram(labels: Array, logits: Array, bins: int = BINS, low: float = LOW, high: float = HIGH) -> Histogram:
    """Count logits in equal bins over [low, high); values outside go to the first or last bin.

    Args:
        labels: 0 or 1 [N].
        logits: Finite scores [N].
        bins: Number of bins.
        low: Lower end of the first bin.
        high: Upper end of the last bin.
    """
    z = np.asarray(logits, np.float64)
    place = np.clip(np.floor((z - low) * (bins / (high - low))), 0, bins - 1).astype(np.int64)
    is_positive = np.asarray(labels) != 0
    return Histogram(
        np.bincount(place[is_positive], minlength=bins),
        np.bincount(place[~is_positive], minlength=bins),
        int(np.count_nonzero((z < low) | (z >= high))),
    )


def binary_metrics(labels: Array, logits: Array) -> dict[str, float | int | None]:
    """Return all metrics of one action.

    Args:
        labels: 0 or 1 [N].
        logits: fp32 scores [N].

    Returns:
        auc, ne, log_loss, calibration, ece (each None where undefined), count, positives. Where a logit is not
        finite all of them are None and `non_finite` counts such logits.
    """
    positives, negatives = _counts(labels)
    counts: dict[str, float | int | None] = {"count": positives + negatives, "positives": positives}
    bad = int(np.count_nonzero(~np.isfinite(np.asarray(logits))))
    if bad:
        return {**dict.fromkeys(KEYS), **counts, "non_finite": bad}
    return {
        "auc": auc(labels, logits),
        "ne": normalized_entropy(labels, logits),
        "log_loss": log_loss(labels, logits),
        "calibration": calibration(labels, logits),
        "ece": ece(labels, sigmoid(logits)),
        **counts,
    }


def supervised_bits(action_names: Sequence[str], supervised: int) -> dict[str, int]:
    """Return {action: bit number} of the supervised actions, in bit order."""
    return {name: bit for bit, name in enumerate(action_names) if supervised >> bit & 1}


def evaluate(
    labels: Array, label_known: Array, logits: Array, action_names: Sequence[str], supervised: int
) -> dict[str, dict[str, Any]]:
    """Return the metrics of every supervised action over the examples for which it is known.

    Args:
        labels: int32 masks [N].
        label_known: int32 masks [N]: which labels are known and counted.
        logits: float32 [N, W], one column a supervised action in bit order; or [N, A], one an action.
        action_names: All A action names in bit order.
        supervised: Mask of the W supervised actions.

    Returns:
        {action: `binary_metrics`}.

    Raises:
        ValueError: The logits have neither W nor A columns.
    """
    bits = supervised_bits(action_names, supervised)
    width = np.shape(logits)[1]
    if width not in (len(bits), len(action_names)):
        raise ValueError(f"logits must have {len(bits)} or {len(action_names)} columns, got {width}")
    found: dict[str, dict[str, Any]] = {}
    for place, (name, bit) in enumerate(bits.items()):
        rows = (np.asarray(label_known) >> bit & 1).astype(bool)
        scores = np.asarray(logits)[rows, place if width == len(bits) else bit]
        found[name] = binary_metrics(np.asarray(labels)[rows] >> bit & 1, scores)
    return found


def evaluate_shards(
    shards: Iterable[tuple[Array, Array, Array]], action_names: Sequence[str], supervised: int
) -> dict[str, dict[str, Any]]:
    """Return the metrics of (labels, label_known, logits) shards as of one set; never a mean over shards."""
    labels, known, logits = (np.concatenate(part) for part in zip(*shards, strict=True))
    return evaluate(labels, known, logits, action_names, supervised)


def metric_keys(role: str, metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return stable flat keys, as in {"holdout/ne/click": 0.91}, from {action: metrics}."""
    return {f"{role}/{key}/{action}": value for action, values in metrics.items() for key, value in values.items()}
