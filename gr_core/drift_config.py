"""The `drift` section of a config: when a night's figures call for a full retrain, and what follows."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from gr_core.section import CENTURY_DAYS, Section


class DriftConfig(Section):
    """What is watched every night, on the parent's scores of the night's new events and on their ids."""

    retrain: Literal["auto", "warn", "off"] = "auto"
    """auto: a trigger starts a full retrain after the night, through the deployment full-retrain where a worker serves it,
    else in the night's process; warn: a finding in `daybreak status`; off: figures alone."""
    nights: int = Field(default=2, ge=1, le=90)
    """Consecutive nights that must show the same before it is a trigger."""
    baseline_nights: int = Field(default=7, ge=1, le=365)
    """Nights before those that they are compared with, of the same lineage."""
    min_nights: int = Field(default=3, ge=1, le=365)
    """With fewer nights to compare with, nothing is a trigger but the days since the last full retrain."""
    ne_increase: float = Field(default=0.05, ge=0)
    """Relative increase of gate.action's next-day NE over the median of the nights before (0.05: five per cent)."""
    standard_errors: float = Field(default=2.0, ge=0)
    """An increase must also be more than so many of its standard errors (over users)."""
    equal_age_increase: float = Field(default=0.05, ge=0)
    """Relative increase of that NE over the lineage of the full retrain before, as many days after its root."""
    psi_scores: float = Field(default=0.25, gt=0)
    """Population stability index of the scores of gate.action, beyond what so few events show by chance. A night whose NE
    is below the median of the nights before by more than `ne_increase` does not count: its model got better."""
    psi_features: float = Field(default=0.25, gt=0)
    """The same of a feature of at most 50 values."""
    unknown_ids_increase: float = Field(default=0.1, gt=0, le=1)
    """Increase of the share of events (0-1) whose id has no row of its own in the parent, for any feature."""
    max_days: int = Field(default=28, ge=0, le=CENTURY_DAYS)
    """Days since the root of the champion's lineage after which a full retrain is due anyway; 0: never."""
    min_days: int = Field(default=7, ge=0, le=CENTURY_DAYS)
    """Days between two full retrains, won or lost, that drift starts."""

    @model_validator(mode="after")
    def _can_trigger(self) -> Self:
        if self.min_nights > self.baseline_nights:
            raise ValueError(
                f"drift.min_nights = {self.min_nights} is above drift.baseline_nights = {self.baseline_nights}, so there "
                "are never nights enough to compare with; lower drift.min_nights or raise drift.baseline_nights"
            )
        if 0 < self.max_days < self.min_days:
            raise ValueError(
                f"drift.max_days = {self.max_days} asks for a full retrain before drift.min_days = {self.min_days} allow "
                "one; raise drift.max_days (0: never by age alone) or lower drift.min_days"
            )
        return self
