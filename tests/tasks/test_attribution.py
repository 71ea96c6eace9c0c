"""What the Prefect UI shows of a training's split."""

from __future__ import annotations

from typing import Any

import pytest

from gr_core.train.attribution import PARTS
from tasks import attribution


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Catch the tables instead of sending them; key -> rows."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        attribution, "create_table_artifact", lambda *, table, key, description: found.update({key: table})
    )
    return found


def test_a_nights_training_is_two_tables(published: dict[str, Any]) -> None:
    """The five parts with their shares, figures, and the advice; metrics that are no perf/* stay out."""
    metrics = {f"perf/seconds/{part}": 1.0 for part in PARTS} | {"perf/steps": 10.0, "perf/mfu": 0.25}
    advice = [{"action": "pack", "expected_saving_fraction": 0.3}]

    attribution.publish_training("2025-06-01", {"metrics": metrics | {"train/loss": 0.5}, "advice": advice})

    rows = {row["figure"]: row["value"] for row in published["training-split"]}
    assert rows["forward"] == "100.00 ms a step, 20.0%"
    assert rows["model FLOP utilisation"] == "25.0%"
    assert published["training-split-advice"] == [{"action": "pack", "expected_saving": "30.0%"}]


def test_a_training_without_attribution_publishes_nothing(published: dict[str, Any]) -> None:
    """A checkpoint of an older release, taken up again, has no split: no table of zeros."""
    attribution.publish_training("2025-06-01", {"metrics": {"perf/tokens_per_second": 5.0}})

    assert published == {}


def test_a_trace_is_named_by_text() -> None:
    """An empty field of the form is no file."""
    assert attribution.path_of("") is None
    assert str(attribution.path_of("/tmp/trace.json")) == "/tmp/trace.json"
