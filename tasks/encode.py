"""One bucket's ids into embedding rows. Policy only; the body is gr_core.stages.packing.encode_bucket."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import packing
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

encode_bucket = task(
    name="encode",
    task_run_name="encode {bucket}",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(packing.encode_bucket)
