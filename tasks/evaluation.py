"""A model on a finished night's new events: the task, and its metrics as a table; the body is gr_core's."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from gr_core.report.evaluated import metric_rows, sentence
from gr_core.stages import reevaluating
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

evaluate_model = task(
    name="evaluate model",
    task_run_name="evaluate {model}",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(reevaluating.evaluate_model)


def publish_evaluation(value: dict[str, Any]) -> None:
    """Publish a model's metrics as an artifact of the current flow run.

    Args:
        value: What the task returned.
    """
    create_table_artifact(table=metric_rows(value), key="evaluation", description=sentence(value))
