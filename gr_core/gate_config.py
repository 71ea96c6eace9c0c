"""The `gate` section of a config: when a challenger is promoted."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gr_core.section import Section


def check_tail(key: str, confidence: float, num_resamples: int) -> None:
    """Refuse a confidence that so few resamples cannot tell: its bound would be the worst of them; ValueError.

    Args:
        key: The confidence's dotted key.
        confidence: One-sided.
        num_resamples: gate.num_resamples.
    """
    needed = math.ceil(round(1 / (1 - confidence), 6))
    if num_resamples < needed:
        raise ValueError(
            f"{key} = {confidence} needs gate.num_resamples of at least {needed}, got {num_resamples}; raise "
            "gate.num_resamples, or lower the confidence"
        )


class GateConfig(Section):
    """When a challenger is promoted."""

    action: str = "click"
    """Action whose NE decides."""
    nights: int = Field(default=3, ge=1)
    """Holdout events that came due in the last this many nights."""
    margin: float = Field(default=0.01, ge=0)
    """Relative NE increase that must be ruled out."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """One-sided confidence of the bound, by paired bootstrap over users."""
    min_positives: int = Field(default=200, ge=1)
    """Fewer positives than this are insufficient data."""
    calibration: tuple[float, float] = (0.8, 1.25)
    """Allowed band of sum of probabilities over sum of labels."""
    insufficient_data: Literal["hold", "promote_if_sane"] = "hold"
    """promote_if_sane: promote when calibrated and NE < 1."""
    cumulative_margin: float = Field(default=0.03, ge=0)
    """Relative NE increase against the last full retrain (the lineage's root) that must be ruled out, with the same
    confidence and on the same rows: small losses, each within the margin, may not add up."""
    num_resamples: int = Field(default=1000, ge=100, le=10**6)
    """Bootstrap resamples."""
    slice_margin: float = Field(default=0.05, ge=0)
    """Relative NE increase of a slice beyond which, shown with `confidence`, it holds the challenger (evaluation.slices)."""
    slice_min_positives: int = Field(default=200, ge=1)
    """A slice with fewer positives than this holds nobody."""

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        check_tail("gate.confidence", self.confidence, self.num_resamples)
        return self

    @field_validator("calibration")
    @classmethod
    def _band(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0 < band[0] < band[1]:
            raise ValueError("must be [low, high] with 0 < low < high, such as [0.8, 1.25]")
        return band
