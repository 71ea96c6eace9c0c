"""Attribution of training: the measuring task, and what the Prefect UI shows of a split; the body is gr_core's."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from gr_core.report.attributed import advice_rows, figure_rows, measured, split_rows
from gr_core.stages import attributing
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

attribute = task(
    name="attribute",
    task_run_name="attribute",
    tags={"gpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(attributing.attribute)


def publish_training(night: str, trained: dict[str, Any]) -> None:
    """Publish where a night's training time went, and what would make it cheaper, as artifacts of the current flow run.

    Args:
        night: The night's key.
        trained: What its training stage returned; of a release without attribution nothing is published.
    """
    value = measured(trained)
    if value is not None:
        publish(value, key="training-split", about=f"training of night {night}")


def publish(value: dict[str, Any], *, key: str, about: str) -> None:
    """Publish a measured run's split, figures and advice as two tables.

    Args:
        value: The object of `stages.attributing.attribute`, or of a night's training.
        key: Of the split's artifact; the advice's is <key>-advice.
        about: What was measured.
    """
    rows = [
        {"figure": row["part"], "value": f"{row['ms_a_step']} ms a step, {row['share']}"} for row in split_rows(value)
    ]
    create_table_artifact(
        table=rows + figure_rows(value), key=key, description=f"Where the time goes: {about}, {value['steps']} steps"
    )
    if value["advice"]:
        create_table_artifact(
            table=advice_rows(value), key=f"{key}-advice", description=f"What would make it cheaper: {about}"
        )


def path_of(trace: str | None) -> Path | None:
    """Return the file of a trace, None for none: a form has text fields alone."""
    return Path(trace) if trace else None
