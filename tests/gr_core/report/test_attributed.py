"""What a person reads of a measured run."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from gr_core.report.attributed import PARTS, advice_rows, figure_rows, render_attribution, split_rows
from gr_core.train import attribution


def measured(forward: float, tokens_per_second: float) -> dict[str, Any]:
    """Return a measured run of two steps."""
    rest = dict.fromkeys(("backward", "optimizer", "data_wait", "metrics"), 0.1)
    perf = {"perf/other_seconds": 0.1, "perf/tokens_per_second": tokens_per_second, "perf/mfu": 0.5, "perf/steps": 2.0}
    advice = [{"action": "pack [all]", "expected_saving_fraction": 0.25}]
    return {"steps": 2, "seconds": {"forward": forward, **rest}, "perf": perf, "advice": advice}


def test_the_split_is_milliseconds_a_step_and_shares_of_its_wall_time() -> None:
    """The rest of the wall time is told as other, so the shares add up to one."""
    rows = {row["part"]: (row["ms_a_step"], row["share"]) for row in split_rows(measured(0.5, 100.0))}

    assert rows["forward"] == ("250.00", "50.0%")
    assert rows["other"] == ("50.00", "10.0%")
    assert len(rows) == 6


def test_the_parts_are_those_that_training_measures() -> None:
    """The report names them itself, since training's own list comes with torch."""
    assert attribution.PARTS == PARTS


def test_figures_and_advice_are_rows_of_text() -> None:
    """Only what was measured stands there; advice keeps its order."""
    value = measured(0.5, 12_345.6)

    assert {row["figure"]: row["value"] for row in figure_rows(value)} == {
        "tokens a second, without padding": "12,346",
        "model FLOP utilisation": "50.0%",
    }
    assert advice_rows(value) == [{"action": "pack [all]", "expected_saving": "25.0%"}]


def test_table_and_chart_stand_beside_the_naive_settings() -> None:
    """Bars are to one scale, the slower side's step is the longest; what looks like markup is shown as it is."""
    written = StringIO()
    console = Console(width=170, file=written)
    console.print(render_attribution(measured(0.5, 200.0) | {"baseline": measured(1.5, 100.0)}))

    text = written.getvalue()
    forward = next(line for line in text.splitlines() if line.strip().startswith("forward"))
    assert forward.count("█") == round(40 * 250 / 1000) + round(40 * 750 / 1000)
    assert "naive: ms a step" in text
    assert "2.00 times as many tokens a second" in text
    assert "pack [all]" in text
