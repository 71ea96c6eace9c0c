"""The `nightly` section of a config: how the nightly run is operated."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from gr_core.section import CENTURY_DAYS, Section


class NightlyConfig(Section):
    """Operation of the nightly run."""

    ready_by: str | None = None
    """Local time HH:MM by which the night should be done."""
    catch_up_days: int = Field(default=7, ge=0, le=366)
    """A scheduled night first runs the nights of at most so many days before its own that have none, oldest first."""
    stage_timeout_seconds: int = Field(default=3600, ge=1, le=CENTURY_DAYS * 86_400)
    """A stage that runs longer is stopped and retried."""

    @field_validator("ready_by")
    @classmethod
    def _clock(cls, time: str | None) -> str | None:
        if time is not None and not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", time):
            raise ValueError("must be a time of day from 00:00 to 23:59, such as 06:30")
        return time
