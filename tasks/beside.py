"""An experiment beside its night's challenger. Policy only; the body is gr_core.stages.experimenting.judge."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import experimenting
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

judge_beside = task(
    name="beside",
    task_run_name="beside",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(experimenting.judge)
