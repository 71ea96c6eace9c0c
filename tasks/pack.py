"""One role's pack. Policy only; the body is gr_core.stages.packing.write_pack."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import packing
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

write_pack = task(
    name="pack",
    task_run_name="pack {role}",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(packing.write_pack)
