"""What every attention path shares: a batch's layout, the plan made of it, and how its tensors are found.

Dims: `T` tokens, `N` targets, `S` segments, `H` heads, `K` head dim, `B` distance buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

Longs = npt.NDArray[np.int64]

NUM_DISTANCES = 64
"""Buckets of a distance, half an octave each: enough for 2^31 seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which keys each token of a batch may attend to, and what its weight may depend on besides."""

    segment_starts: Longs
    """[S + 1], offsets in the batch."""
    lo: Longs
    """First key of each token, batch-relative, [T]."""
    hi: Longs
    """One past the last key, [T]; a token also attends to itself."""
    targets: Longs
    """Token numbers of the targets, ascending, [N]."""
    time: Longs | None = None
    """Microseconds since the epoch, [T]; needed with `half_life_us` and `distances`."""
    position: Longs | None = None
    """Number of history tokens before each token, [T]; needed with `distances`."""
    half_life_us: float | None = None
    """A key's weight halves per this age against its query (before the softmax is normalised); None: no decay."""
    distances: bool = False
    """Whether weights depend on the distances in position and in time (HSTU's bias)."""

    @property
    def segment_of(self) -> Longs:
        """Segment number of each token, [T]."""
        return np.repeat(np.arange(len(self.segment_starts) - 1), np.diff(self.segment_starts))

    @property
    def first_of(self) -> Longs:
        """Number of the first token of each token's segment, [T]."""
        return np.repeat(self.segment_starts[:-1], np.diff(self.segment_starts))


@dataclass(frozen=True, slots=True)
class Pointwise:
    """HSTU's weights: silu(score + position bias + time bias) / divisor, instead of a softmax."""

    positions: Tensor
    """Bias of each log-bucketed distance in position, [B, H]."""
    times: Tensor
    """Bias of each log-bucketed distance in time, [B, H]."""
    divisor: float
    """The same for every token, so that a long history weighs more than a short one."""


class AttentionPlan(ABC):
    """How one batch attends on one path. Subclasses are frozen dataclasses of tensors, all on one device."""

    __slots__ = ()
    kernel: ClassVar[str]
    """Name of what runs, for logs, state.json and `attention.require`."""

    @property
    def padding_fraction(self) -> float:
        """Share of the attention's places without a token (0-1)."""
        return 0.0

    @abstractmethod
    def attend(self, qk_TGK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with every token as a query.

        Args:
            qk_TGK: Queries, then keys of all tokens, [T, 2 H, K].
            v_THK: Values, [T, H, K].
            pointwise: HSTU's weights; None: softmax.

        Returns:
            [T, H, K]; equal to `kernels.interval_attention` up to rounding.
        """

    @abstractmethod
    def attend_targets(self, q_NHK: Tensor, k_THK: Tensor, v_THK: Tensor, pointwise: Pointwise | None = None) -> Tensor:
        """Attend with targets only as queries: [N, H, K] and twice [T, H, K] to [N, H, K]."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the plan with every tensor changed; each is changed once, in a fixed order."""
        mapped: Self = map_tensors(self, change)
        return mapped

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in the order of `map`."""
        return list_tensors(self)


Planner = Callable[[Layout], AttentionPlan]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a dataclass, tuple or tensor with every tensor in it changed, each once, in the order of the fields."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)})
    return value


def list_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a dataclass, tuple or tensor, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def log_bucket(distance: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return distances (0 or more) as buckets of half an octave: 0, 2, 3, 4, 4, 5, ... below NUM_DISTANCES."""
    bucket = 2 * np.log2(1.0 + np.maximum(distance, 0))
    found: npt.NDArray[np.uint8] = np.minimum(bucket, NUM_DISTANCES - 1).astype(np.uint8)
    return found
