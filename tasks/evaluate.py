"""Progressive validation: the parent on the night's new events. Policy only; the body is gr_core.stages.judging.evaluate."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import judging
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

evaluate = task(
    name="evaluate",
    task_run_name="evaluate parent",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(judging.evaluate)
