"""The `source.checks` section of a config: how a day's data is compared with the days before it, and what follows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gr_core.section import Section

Level = Literal["off", "warn", "hold", "stop"]


class CheckRule(Section):
    """One data check."""

    level: Level = "warn"
    """off; warn: a finding; hold: committed, but the gate holds; stop: the night fails before anything is committed."""


class VolumeRule(CheckRule):
    """Rows read, against the median of the past days."""

    low: float = Field(default=0.3, ge=0, le=1)
    """Fewer rows than this many times the median are a finding."""
    high: float = Field(default=3.0, ge=1)
    """More rows than this many times the median are a finding."""


class RateRule(CheckRule):
    """A share of rows, against the median share of the past days."""

    max_increase: float = Field(default=0.1, ge=0, le=1)
    """How much the share (0-1) may lie above the median."""


class ChecksConfig(Section):
    """Data checks of an ingestion against the last days."""

    days: int = Field(default=7, ge=1, le=90)
    """Past ingestions that a day is compared with."""
    min_days: int = Field(default=3, ge=1)
    """Fewer past ingestions than this: nothing but the schema is compared."""
    volume: VolumeRule = VolumeRule()
    """Rows read."""
    null_rate: RateRule = RateRule()
    """Nulls of every contract column, and unknowns of every action that the feed gives."""
    duplicate_rate: RateRule = RateRule()
    """Rows that repeat an event, of the same day or an earlier one."""
    clock_skew: RateRule = RateRule(max_increase=0.02)
    """Rows quarantined as shown too long after the end of their day."""
    quarantine_rate: RateRule = RateRule(max_increase=0.05)
    """Rows quarantined for any reason."""
    schema_drift: CheckRule = CheckRule()
    """Raw columns that appeared, vanished or changed their type since the newest past ingestion."""

    @model_validator(mode="after")
    def _enough(self) -> ChecksConfig:
        if self.min_days > self.days:
            raise ValueError(f"source.checks.min_days must be at most source.checks.days = {self.days}")
        return self
