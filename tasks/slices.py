"""What the Prefect UI shows of a night's slices: one table, a row a (model, slice, action)."""

from typing import Any

from prefect.artifacts import create_table_artifact

from gr_core.report.sliced import slice_rows


def publish_slices(night: str, *results: dict[str, Any]) -> None:
    """Publish what stages measured by slice as an artifact of the current flow run; nothing where they measured none.

    Args:
        night: The night's key.
        results: What its evaluation and gate returned.
    """
    rows = [row for result in results for row in result.get("slices") or []]
    if rows:
        about = f"Metrics of night {night} by slice (evaluation.slices); a dash is a metric that is not defined"
        create_table_artifact(table=slice_rows(rows), key="slices", description=about)
