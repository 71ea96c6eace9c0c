"""The backfill flow: nights of a range of days, oldest first, one at a time; a failure stops the rest."""

from __future__ import annotations

from datetime import date as Date
from datetime import timedelta
from typing import Any

from prefect import flow

from flows.nightly import nightly
from flows.runners import Runner
from gr_core.errors import UsageError


def backfill_name() -> str:
    """Name a backfill run by its range."""
    from prefect.runtime import flow_run

    return f"backfill {flow_run.parameters.get('start')} to {flow_run.parameters.get('end')}"


@flow(name="backfill", flow_run_name=backfill_name)
def backfill(
    start: Date,
    end: Date,
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    runner: Runner = "threads",
) -> dict[str, Any]:
    """Run the night of each day from `start` to `end`; finished ones are passed over.

    Args:
        start: First lake day.
        end: Last lake day, included.
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/<name>.
        overrides: Config overrides, each dotted.key=value.
        runner: Where buckets are built: threads of this machine, or workers of a Ray cluster (RAY_ADDRESS, else local).

    Returns:
        {"nights": [...]}, oldest first.
    """
    if end < start:
        raise UsageError(f"--end {end} lies before --start {start}; swap them", where="end")
    days = [start + timedelta(days=n) for n in range((end - start).days + 1)]
    same: dict[str, Any] = {"config": config, "home": home, "overrides": overrides, "runner": runner}
    return {"nights": [nightly(date=day, mode="backfill", **same) for day in days]}
