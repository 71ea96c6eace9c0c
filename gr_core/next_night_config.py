"""The `next_night` section of a config: the check of a champion on the first events after it, and its rollback."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gr_core.section import Section


class NextNightConfig(Section):
    """Each night's check of the champion against the one before it, on all users' new events of gate.action."""

    rollback: Literal["auto", "warn", "off"] = "auto"
    """What follows when the champion is worse. auto: it is rolled back by itself, and the night's challenger, which started
    from it, is held; warn: a finding; off: nothing is checked."""
    margin: float = Field(default=0.01, ge=0)
    """Relative NE increase over the previous champion that must be shown: the interval's lower end lies above it."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """One-sided confidence of the interval, by paired bootstrap over users (gate.num_resamples)."""
    min_positives: int = Field(default=200, ge=1)
    """With fewer positives among the events that neither was trained on, nothing is concluded."""
