"""Champion against challenger; the decision goes to the journal. Policy only; the body is gr_core.stages.gating.gate."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import gating
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

gate = task(
    name="gate",
    task_run_name="gate",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(gating.gate)
