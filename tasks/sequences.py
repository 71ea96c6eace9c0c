"""One bucket's due and new events into sequences. Policy only; the body is gr_core.stages.sequencing.build_bucket."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import sequencing
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

build_bucket = task(
    name="sequences",
    task_run_name="sequences {bucket}",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(sequencing.build_bucket)
