"""A full retrain's vocabulary, counted anew. Policy only; the body is gr_core.stages.retraining.survey."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from gr_core.stages import retraining
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

survey = task(
    name="survey",
    task_run_name="survey",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(retraining.survey)
