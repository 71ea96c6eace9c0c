"""How much a supervised token counts in the loss: normalisation, half-life and position, decided before the forward pass.

Dims: `N` supervised tokens, `R` rows of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gr_core.data.batches import Batch
from gr_core.model.losses import loss_weights

Array = npt.NDArray[Any]
_DAY_US = 86_400_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighting:
    """w_t of a token: what `normalize` says (examples 6), times its half-life and position weights.

    The loss is sum(w_t * loss_t) / sum(w_t): every factor stands above and below the line, so that a night of old events
    takes steps as long as a night of new ones; only the events' shares of a step change.
    """

    normalize: str = "token"
    """token, segment or event_weight."""
    half_life_days: float | None = None
    """A token's weight halves for each such age; None: age changes nothing."""
    cutoff_us: int = 0
    """Age counts back from here: the night's cutoff, us UTC."""
    position_feature: str | None = None
    """Feature whose value tells the place in the list; None: the place changes nothing."""
    position_weights: npt.NDArray[np.float32] | None = None
    """Weight of each row of that feature's table, [R]."""

    @property
    def is_plain(self) -> bool:
        """Whether the normalisation is all: the pack index holds the sums of each batch then."""
        return self.half_life_days is None and self.position_feature is None

    def weights(self, batch: Batch, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return w_t of a batch's targets, [N] fp32; nothing but the batch's own columns is read.

        Args:
            batch: The batch.
            targets: Token numbers of its targets, ascending, [N].

        Raises:
            ValueError: Another normalisation.
        """
        segment_of = np.searchsorted(batch.segment_starts, targets, side="right") - 1
        weights = loss_weights(self.normalize, batch.weight.numpy()[targets], segment_of)
        if self.half_life_days is not None:
            age_us = np.maximum(self.cutoff_us - batch.time.numpy()[targets], 0)
            weights *= np.exp2(age_us / (-self.half_life_days * _DAY_US)).astype(np.float32)
        if self.position_feature is not None:
            assert self.position_weights is not None
            weights *= self.position_weights[batch.rows[self.position_feature].numpy()[targets]]
        return weights

    def total(self, batch: Batch) -> float:
        """Return the sum of a batch's weights: its part of the step's denominator."""
        targets = np.flatnonzero(batch.supervise.numpy())
        return float(self.weights(batch, targets).sum(dtype=np.float64))
