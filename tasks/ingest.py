"""The day's raw events into the event table. Policy only; the body is gr_core.stages.ingesting.ingest."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import ingesting
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

ingest = task(
    name="ingest",
    task_run_name="ingest {night.key}",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(ingesting.ingest)
