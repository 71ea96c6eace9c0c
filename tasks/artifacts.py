"""What the Prefect UI shows of a night: its counts and metrics as a table, and a link to the MLflow run."""

from typing import Any

from prefect.artifacts import create_link_artifact, create_table_artifact


def publish_night(status: dict[str, Any], link: str | None) -> None:
    """Publish a finished night's numbers as artifacts of the current flow run.

    Args:
        status: The night's object as in `daybreak status --json`.
        link: URI of the night's MLflow run, if it has one.
    """
    rows = [{"figure": key, "value": str(status[key])} for key in ("state", "gate", "version", "parent")]
    rows += [{"figure": f"rows {key}", "value": str(value)} for key, value in status["rows"].items()]
    rows += [
        {"figure": f"action_rows {key}", "value": str(value)} for key, value in status.get("action_rows", {}).items()
    ]
    rows += [
        {"figure": key, "value": str(status[key])}
        for key in ("due_events", "supervised_events", "holdout_events", "new_events", "late_events")
    ]
    rows += [
        {"figure": key, "value": str(status[key])} for key in ("replayed_events", "sampled_out_events") if key in status
    ]
    for action, metrics in status["next_day"].items():
        rows += [{"figure": f"next_day {key} {action}", "value": str(value)} for key, value in metrics.items()]
    rows += [{"figure": f"seconds {key}", "value": str(value)} for key, value in status["seconds"].items()]
    create_table_artifact(
        table=rows, key="night", description=f"Night {status['date']}: {'; '.join(status['reasons'])}"
    )
    if status.get("checkpoints"):
        early = sum(1 for one in status["checkpoints"] if one["scored_during_training"])
        create_table_artifact(
            table=[_checkpoint_row(one) for one in status["checkpoints"]],
            key="checkpoints",
            description=f"Holdout metrics of night {status['date']}'s checkpoints; {early} scored before training ended",
        )
    if link:
        create_link_artifact(link=link, link_text=f"MLflow run of {status['date']}", key="mlflow-run")


def _checkpoint_row(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Return a checkpoint's line of the table: when it was scored, and its metrics by action."""
    row = {key: str(checkpoint[key]) for key in ("step", "final", "scored_during_training", "before_end_seconds")}
    for action, metrics in checkpoint["holdout"].items():
        row |= {f"{key} {action}": str(value) for key, value in metrics.items()}
    return row
