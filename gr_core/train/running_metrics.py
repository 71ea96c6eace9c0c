"""Metrics while a night trains: on the device and fused (default), as most teams compute them, or none.

`fused` is kernels.bucketed_auc: one histogram of logits for all actions. `naive` is the baseline that `daybreak attribute
--baseline` and benchmarks measure: action by action, a comparison of every probability with 1,000 thresholds, as
torchmetrics' BinaryAUROC(thresholds=1000) does it. Both count the same rows, so their AUCs differ by no more than their
certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.bucketed_auc import ActionMetrics, BucketedAUC, action_metrics, sums_reference
from kernels.choice import choose

Kind = Literal["fused", "naive", "off"]
THRESHOLDS = 1000
_ROWS_AT_ONCE = 16_384


class RunningMetrics(Protocol):
    """What the loop needs: rows in, the night's metrics out; sums by name, so that checkpoints and ranks can add them."""

    def update(self, logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> None:
        """Count rows: logits [N, A] float, labels [N, A] bool, known [N, A] bool."""

    def state(self) -> dict[str, Tensor]:
        """Return all that was counted, by name: views, each a sum over rows."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the counts that `state` returned."""

    def compute(self) -> list[ActionMetrics]:
        """Return the metrics of each action."""


def new_metrics(kind: Kind, num_actions: int, device: torch.device) -> RunningMetrics:
    """Return the metrics of `train.metrics`."""
    made: dict[Kind, Callable[[int, torch.device], RunningMetrics]] = {
        "fused": BucketedAUC,
        "naive": ThresholdedAUC,
        "off": NoMetrics,
    }
    if kind == "fused" and device.type == "cpu" and choose("bucketed_auc", "auto", torch.empty(0)) == "reference":
        return Gathered(BucketedAUC(num_actions))
    return made[kind](num_actions, device)


class Gathered:
    """Counts the rows of several steps at once: on the CPU a step's few rows cost less than the operators' own overhead.

    Sums of floats are added step by step all the same, so that they do not depend on when counts are asked for.

    Args:
        metrics: What counts; nobody else updates or reads it.
    """

    def __init__(self, metrics: BucketedAUC) -> None:
        self._metrics = metrics
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows = 0

    @torch.no_grad()
    def update(self, logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> None:
        """See RunningMetrics; the tensors are kept for a while and must not change."""
        self._metrics.check(logits_NA, labels_NA, known_NA)
        self._metrics.add_sums(logits_NA, labels_NA, known_NA)
        self._waiting.append((logits_NA, labels_NA, known_NA))
        self._rows += len(logits_NA)
        if self._rows >= _ROWS_AT_ONCE:
            self._count()

    def state(self) -> dict[str, Tensor]:
        """See RunningMetrics; counts what waits, as `compute` does."""
        self._count()
        return self._metrics.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See RunningMetrics; what waits is forgotten."""
        self._waiting, self._rows = [], 0
        self._metrics.load(state)

    def compute(self) -> list[ActionMetrics]:
        """See RunningMetrics."""
        self._count()
        return self._metrics.compute()

    @torch.no_grad()
    def _count(self) -> None:
        if self._waiting:
            logits, labels, known = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
            self._waiting, self._rows = [], 0
            self._metrics.add_counts(logits, labels, known)


class ThresholdedAUC:
    """Counts of rows at or above each of 1,000 thresholds of the probability, action by action.

    Args:
        num_actions: A.
        device: Where the counts lie.
    """

    def __init__(self, num_actions: int, device: torch.device | str = "cpu") -> None:
        self._thresholds = torch.linspace(0, 1, THRESHOLDS, device=device)
        self.confusion_AH4 = torch.zeros(num_actions, THRESHOLDS, 4, dtype=torch.int64, device=device)
        """True negatives, false positives, false negatives, true positives at each threshold."""
        self.sums_A4 = torch.zeros(num_actions, 4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> None:
        """See RunningMetrics."""
        for action in range(logits_NA.shape[1]):
            known = known_NA[:, action]
            probability, label = torch.sigmoid(logits_NA[known, action]), labels_NA[known, action].long()
            above_NH = (probability[:, None] >= self._thresholds).long()
            cell_NH = above_NH + 2 * label[:, None] + 4 * torch.arange(THRESHOLDS, device=label.device)
            counts = torch.bincount(cell_NH.flatten(), minlength=4 * THRESHOLDS)
            self.confusion_AH4[action] += counts.view(THRESHOLDS, 4)
        self.sums_A4 += sums_reference(logits_NA, labels_NA, known_NA)

    def state(self) -> dict[str, Tensor]:
        """See RunningMetrics."""
        return {"confusion_AH4": self.confusion_AH4, "sums_A4": self.sums_A4}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See RunningMetrics."""
        for name, counts in self.state().items():
            counts.copy_(state[name])

    def compute(self) -> list[ActionMetrics]:
        """See RunningMetrics; the area by trapezoids, which is ties between two thresholds half."""
        above_AH = self.confusion_AH4[:, :, [1, 3]]
        # between two thresholds: at or above the one, below the next
        bins = above_AH - torch.nn.functional.pad(above_AH[:, 1:], (0, 0, 0, 1))
        return [
            action_metrics(counts[:, 1], counts[:, 0], sums)
            for counts, sums in zip(bins.unbind(), self.sums_A4.unbind(), strict=True)
        ]


class NoMetrics:
    """Counts nothing: no AUC, NE or calibration of the night's training; its loss is there all the same.

    Args:
        num_actions: A.
        device: Not used.
    """

    def __init__(self, num_actions: int, device: torch.device | str = "cpu") -> None:
        del device
        self._num_actions = num_actions

    def update(self, logits_NA: Tensor, labels_NA: Tensor, known_NA: Tensor) -> None:
        """See RunningMetrics."""

    def state(self) -> dict[str, Tensor]:
        """See RunningMetrics."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See RunningMetrics."""

    def compute(self) -> list[ActionMetrics]:
        """See RunningMetrics."""
        empty = torch.zeros(1, dtype=torch.int64)
        return [action_metrics(empty, empty, torch.zeros(4)) for _ in range(self._num_actions)]
