"""The backfill flow: nights of a range of days, oldest first, one at a time; a failure stops the rest."""

from __future__ import annotations

from datetime import date as Date
from datetime import timedelta
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.nightly import ConfigPath, HomeUri, Overrides, nightly
from gr_core.errors import UsageError


def backfill_name() -> str:
    """Name a backfill run by its range."""
    from prefect.runtime import flow_run

    return f"backfill {flow_run.parameters.get('start')} to {flow_run.parameters.get('end')}"


@flow(name="backfill", flow_run_name=backfill_name)
def backfill(
    start: Annotated[Date, Field(description="First lake day")],
    end: Annotated[Date, Field(description="Last lake day, included")],
    config: ConfigPath = "conf/world.toml",
    home: HomeUri = None,
    overrides: Overrides = [],  # noqa: B006 -- Prefect copies parameters
) -> dict[str, Any]:
    """Run the night of each day from `start` to `end`; finished ones are passed over."""
    if end < start:
        raise UsageError(f"--end {end} lies before --start {start}; swap them", where="end")
    days = [start + timedelta(days=n) for n in range((end - start).days + 1)]
    return {
        "nights": [nightly(config=config, date=day, home=home, overrides=overrides, mode="backfill") for day in days]
    }
