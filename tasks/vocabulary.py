"""The parent's vocabulary grown by this night's ids. Policy only; the body is gr_core.stages.packing.grow_vocabulary."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import packing
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

grow_vocabulary = task(
    name="vocabulary",
    task_run_name="vocabulary",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(packing.grow_vocabulary)
