"""Slices on the page of a night and in Prefect: named as they are, undefined as a dash, safe with any text."""

from __future__ import annotations

from typing import Any

from gr_core.report.nightly_page import collect
from gr_core.report.page import render_page
from gr_core.report.sliced import slice_rows, slice_section
from tests.gr_core.report.test_page import HOSTILE, read, records

METRICS = ("auc", "ne", "log_loss", "calibration", "ece", "gauc_user_mean", "gauc_impression_weighted")


def row(role: str, model: int, name: str, **more: Any) -> dict[str, Any]:
    values = {"auc": 0.7123, "auc_error": 0.01, "ne": 0.8, "ne_error": None, "calibration": 1.1}
    counts = {"count": 1200, "positives": 80, "users": 40, "gauc_users": 30}
    named = {"role": role, "model": model, "slice": name, "action": "click"}
    return {**dict.fromkeys(METRICS), **values, **counts, **named, **more}


JUDGED = {
    "action": "click",
    "slice_margin": 0.05,
    "slices": [
        {"slice": "surface=feed", "count": 1200, "positives": 80, "users": 40, "difference": 0.1, "lower": 0.06}
        | {"upper": 0.14, "verdict": "veto"},
        {"slice": "items=new", "count": 3, "positives": 0, "users": 2, "difference": None, "lower": None}
        | {"upper": None, "verdict": "insufficient_data"},
    ],
}


def test_a_night_shows_its_slices() -> None:
    """Parent and challenger by slice with intervals and counts, the champion not; the gate's word on each slice."""
    rows = [row("next_day", 1, "all"), row("next_day", 1, "surface=feed", gauc_user_mean=0.6543)]
    rows += [row("holdout", 2, "surface=feed", auc=0.81), row("holdout", 1, "surface=feed", auc=0.9999)]
    page = read(slice_section(rows, JUDGED))

    assert ["surface=feed", "0.7123 ± 0.0196", "0.8000", "1.1000", "0.6543", "-", "1,200", "80", "40"] in page.rows
    assert any(cells[:2] == ["surface=feed", "0.8100 ± 0.0196"] for cells in page.rows)
    assert "0.9999" not in page.text
    assert ["surface=feed", "veto", "+10.00%", "+6.00%", "+14.00%", "80", "1,200", "40"] in page.rows
    assert ["items=new", "insufficient data", "-", "-", "-", "0", "3", "2"] in page.rows
    assert "GAUC, impression weighted" in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 3


def test_slices_stand_on_the_page_and_their_values_stay_text() -> None:
    """A value that is a tag is shown as it is; a night without slices says so."""
    found = records()
    results = {"evaluate": {"slices": [row("next_day", 1, "all"), row("next_day", 1, f"surface={HOSTILE}")]}}
    page = read(render_page(collect(found["2025-06-04"], found.values(), results)))
    without = read(render_page(collect(found["2025-06-04"], found.values(), {})))

    assert f"surface={HOSTILE}" in page.text
    assert "script" not in {tag for tag, _ in page.tags}
    assert "No slice was measured." in without.text
    assert "No slice was measured." not in page.text


def test_rows_for_people_have_every_slice() -> None:
    """One a (role, model, slice, action), undefined as a dash."""
    (told,) = slice_rows([row("holdout", 3, "items=new", auc=None, count=0)])

    assert told["slice"] == "items=new"
    assert (told["events"], told["model"], told["AUC"], told["count"]) == ("holdout", "3", "-", "0")
