"""Config section `alerts`: who is told of a night that failed, was held, is late, or of a champion that is stale."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gr_core.section import Section

Alert = Literal["failed", "held", "stale", "late"]


class AlertsConfig(Section):
    """What a night tells, beside its status, and to whom."""

    block: Annotated[str, Field(pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")] | None = None
    """Prefect notification block that is told, as type/name, such as slack-webhook/on-call; none: `status` alone tells."""
    on: tuple[Alert, ...] = ("failed", "held", "stale", "late")
    """What is told: a night failed; the gate held its challenger; the champion is stale; `nightly.ready_by` will be missed."""
    stale_champion_days: int = Field(default=2, ge=1, le=3650)
    """A champion whose day lies more than so many days back is stale."""

    @model_validator(mode="after")
    def _told_something(self) -> Self:
        if self.block is not None and not self.on:
            raise ValueError(
                f"alerts.on = [] tells alerts.block = {self.block!r} nothing; list what it is told, such as "
                'alerts.on = ["failed"], or leave alerts.block out'
            )
        return self
