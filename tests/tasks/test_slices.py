"""What the Prefect UI shows of a night's slices."""

from __future__ import annotations

from typing import Any

import pytest

from tasks import slices
from tests.gr_core.report.test_sliced import row


def test_a_nights_slices_are_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of evaluation and gate under one key; a night without a parent and slices publishes nothing."""
    found: list[Any] = []
    monkeypatch.setattr(slices, "create_table_artifact", lambda **told: found.append(told))

    slices.publish_slices("2025-06-01", {}, {"slices": []})
    slices.publish_slices("2025-06-02", {"slices": [row("next_day", 1, "all")]}, {"slices": [row("holdout", 2, "all")]})

    (told,) = found
    assert told["key"] == "slices"
    assert "2025-06-02" in told["description"]
    assert [one["events"] for one in told["table"]] == ["next_day", "holdout"]
