"""The champion moved by an operator: the moving task, and what the Prefect UI shows of it; the body is gr_core's."""

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from gr_core.config import Config
from gr_core.stages import moving


def _move(settings: Config, home: str, *, action: str, version: int | None, reason: str, at_us: int) -> dict[str, Any]:
    """Promote a version or roll back; returns the object of `daybreak promote --json`."""
    if action == "promote":
        assert version is not None
        return moving.promote(settings, home, version, reason=reason, at_us=at_us)
    return moving.rollback(settings, home, version, reason=reason, at_us=at_us)


# No retries: an entry whose answer was lost is in the journal, and moving again would refuse it or go further back.
move = task(name="move", task_run_name="{action}", tags={"cpu"}, cache_policy=NO_CACHE)(_move)


def publish(value: dict[str, Any], *, action: str, reason: str) -> None:
    """Publish what the champion is now as a table of the current flow run.

    Args:
        value: The object of `daybreak promote --json`.
        action: promote or rollback.
        reason: The operator's words.
    """
    shown = {"champion": value["champion"], "the next rollback goes to": value["previous"], "reason": reason}
    rows = [{"figure": key, "value": "-" if told is None else str(told)} for key, told in shown.items()]
    create_table_artifact(table=rows, key="promotion", description=f"{action}: champion is {value['champion']}")
