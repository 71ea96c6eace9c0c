"""Drift of a night, shown in the Prefect UI; the body is gr_core.stages.drifting.measure."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from gr_core.night import Night
from gr_core.stages import drifting
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient


def measure_and_show(night: Night, buckets: list[dict[str, Any]], evaluated: dict[str, Any]) -> dict[str, Any]:
    """Measure a night's drift, and show its figures and what calls for a full retrain."""
    found = drifting.measure(night, buckets, evaluated)
    rows = [{"figure": key, "value": "-" if v is None else f"{v:.4g}"} for key, v in found["metrics"].items()]
    why = "; ".join(one["message"] for one in found["triggers"]) or "nothing calls for a full retrain"
    create_table_artifact(table=rows, key="drift", description=f"Drift of night {night.key}: {why}")
    return found


measure_drift = task(
    name="drift",
    task_run_name="drift",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(measure_and_show)
