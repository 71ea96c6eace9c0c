"""The attribution flow: parameters in, the measured object out, its tables in the Prefect UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows import attribution as module
from gr_core.train.attribution import PARTS

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


def measured(share: float) -> dict[str, Any]:
    """Return what measuring a run of four steps returns."""
    perf = {"perf/other_seconds": 0.0, "perf/tokens_per_second": 100.0}
    advice = [{"action": "pack", "expected_saving_fraction": share}]
    return {"steps": 4, "seconds": dict.fromkeys(PARTS, share), "perf": perf, "advice": advice}


def test_the_flow_measures_and_publishes_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for what its form says; both sides are tables of its run, and it returns the command's object."""
    asked: dict[str, Any] = {}

    def measure(settings: Any, home: str, **more: Any) -> dict[str, Any]:
        asked.update(more, name=settings.name, home=home, seed=settings.pack.seed)
        return {**measured(0.25), "baseline": measured(0.5)}

    monkeypatch.setattr(module, "attribute", measure)
    published: dict[str, Any] = {}
    monkeypatch.setattr(module, "publish", lambda value, *, key, about: published.update({key: (value, about)}))
    config, home = str(tiny.make(tmp_path, days=0)), str(tmp_path / "home")

    found = module.attribution(
        config=config, home=home, overrides=["pack.seed=3"], steps=4, baseline=True, trace="trace.json"
    )

    assert found == {**measured(0.25), "baseline": measured(0.5)}
    assert asked == {
        "name": "tiny",
        "home": home,
        "seed": 3,
        "steps": 4,
        "baseline": True,
        "trace": Path("trace.json"),
    }
    assert published["attribution"][0] == found
    assert published["attribution-naive"][0] == found["baseline"]
