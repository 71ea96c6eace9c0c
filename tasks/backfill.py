"""What the Prefect UI shows of a backfill: its days as a table."""

from prefect.artifacts import create_table_artifact


def publish_backfill(rows: list[dict[str, str]]) -> None:
    """Publish the days of a backfill as an artifact of the current flow run.

    Args:
        rows: `gr_core.report.backfilled.day_rows`.
    """
    create_table_artifact(table=rows, key="backfill", description="The days of a backfill, in the order they run")
