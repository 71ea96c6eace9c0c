"""The checkpoint as a model version, before the gate. Policy only; the body is gr_core.stages.judging.register."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import judging
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

register = task(
    name="register",
    task_run_name="register",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(judging.register)
