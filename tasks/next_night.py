"""The champion against the one before it, beside training: Prefect policy and an artifact; the body is gr_core's."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from gr_core.report.next_night import rows, sentence
from gr_core.stages import next_night
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

check_champion = task(
    name="next-night check",
    task_run_name="check champion",
    tags={"cpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(next_night.check)


def publish_check(key: str, checked: dict[str, Any]) -> None:
    """Publish what the check found as an artifact of the current flow run.

    Args:
        key: The night's.
        checked: What the task returned.
    """
    create_table_artifact(table=rows(checked), key="next-night-check", description=f"Night {key}: {sentence(checked)}")
