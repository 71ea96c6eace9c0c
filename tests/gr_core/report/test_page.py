"""The page of a night: complete by itself, safe with hostile names, and honest about what is not defined."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from gr_core.lake.ledger import NightRecord, nights
from gr_core.report.nightly_page import collect
from gr_core.report.page import render_page
from tests.gr_core.report.test_status import HELD, example_entries

HOSTILE = '<script src="x">alert(1)</script>&"\''
VOID = ("meta", "br")


class Reader(HTMLParser):
    """Reads a page: its tags must be balanced; keeps tags with attributes and the text of each table cell."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a tag."""
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        """Close the tag that was opened last, and no other."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take text."""
        self.text += data
        if self.open and self.rows and "tr" in self.open:
            self.rows[-1][-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def records(**status: Any) -> dict[str, NightRecord]:
    """Return the four nights of example 1; the last one's status with these values, and a gate's figures."""
    entries = example_entries()
    entries[-1].payload["status"] |= status
    decided = next(entry for entry in reversed(entries) if entry.kind == "decided")
    decided.payload["figures"] = {
        "action": "click",
        "count": 900,
        "positives": 80,
        "users": 40,
        "ne_challenger": 0.81,
        "ne_champion": 0.82,
        "auc_challenger": 0.7654,
        "auc_champion": None,
        "difference": -0.0123,
        "standard_error": 0.004,
        "upper_bound": 0.0001,
        "margin": 0.01,
        "full_retrain": 7,
        "cumulative_difference": -0.2,
        "cumulative_upper_bound": -0.17,
        "cumulative_margin": 0.03,
        "artifact_difference": 1.2e-7,
    }
    return nights(entries)


def page_of(day: str, found: dict[str, NightRecord], **results: Any) -> Reader:
    return read(render_page(collect(found[day], found.values(), results)))


def trained(padding: float = 0.0482) -> dict[str, Any]:
    perf = {"perf/steps": 4.0, "perf/padding_fraction": padding, "perf/other_seconds": 0.4, "perf/mfu": None}
    seconds = {f"perf/seconds/{part}": 0.4 for part in ("forward", "backward", "optimizer", "data_wait", "metrics")}
    train = {"train/ne/click": 0.5, "train/count/click": 77, "train/learning_rate/dense/first": 0.1}
    return {"metrics": perf | seconds | train, "advice": [{"action": "pack", "expected_saving_fraction": 0.25}]}


def test_the_page_needs_nothing_beside_it_and_fits_a_phone() -> None:
    """No address, no script, no image or style from elsewhere; a viewport, both colour schemes, tables that scroll."""
    found = records()
    text = render_page(collect(found["2025-06-04"], found.values(), {"train": trained()}))
    page = read(text)

    assert not re.search(r"https?://|@import|url\(", text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not any(key.startswith("on") or key in ("src", "href") for _, attributes in page.tags for key in attributes)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "prefers-color-scheme:dark" in text
    assert text.count("<table>") == text.count('<div class="scroll"><table>') > 5
    assert text.startswith("<!doctype html>")


def test_hostile_names_of_feeds_columns_and_actions_stay_text() -> None:
    """A name that is a tag is shown as it is: in reasons, findings, quarantine, actions, figures and attributes."""
    metrics = {"auc": 0.7, "ne": 0.9, "count": 5, "positives": 2}
    found = records(next_day={HOSTILE: metrics}, action_rows={HOSTILE: 3}, reasons=[HOSTILE])
    text = render_page(
        collect(
            found["2025-06-04"],
            found.values(),
            {"ingest": {"reasons": {HOSTILE: 7}}, "gate": {"holdout": {HOSTILE: metrics}}, "train": trained()},
        )
    )
    page = read(text)

    assert "<script" not in text
    assert [HOSTILE, "7"] in page.rows
    assert [f"holdout, by the challenger: {HOSTILE}", "0.7000", "0.9000", "-", "-", "5", "2"] in page.rows
    assert f"AUC of {HOSTILE} over nights" in [attributes.get("aria-label") for _, attributes in page.tags]


def test_a_promoted_and_a_held_night_say_so_and_why() -> None:
    """The gate's word, its reasons and, where it compared, the figures with the interval."""
    found = records()

    held, promoted = page_of("2025-06-02", found), page_of("2025-06-04", found)

    assert ("strong", {"class": "held"}) in held.tags
    assert HELD in held.text
    assert ("strong", {"class": "promoted"}) in promoted.tags
    assert ["AUC", "0.7654", "-"] in promoted.rows
    assert "NE differs by -1.23%, standard error 0.40%, upper bound 0.01%, margin 1.00%" in promoted.text
    told = "From the last full retrain, version 7, NE differs by -20.00%, upper bound -17.00%, margin 3.00%"
    assert told in promoted.text
    assert "loaded in a fresh process, scores within 1e-07 of the night's own evaluation" in promoted.text
    assert "The gate has decided nothing." in held.text


def test_what_befell_a_version_later_stands_on_its_page() -> None:
    """A night whose version was rolled back tells it, once its page is written again."""
    assert "rolled back by an operator" in page_of("2025-06-03", records()).text


def test_undefined_metrics_are_a_dash_beside_their_count() -> None:
    """One positive of one event: no AUC and no NE, and the counts say why."""
    page = page_of("2025-06-04", records())

    assert ["next day, by the parent: click", "-", "-", "-", "-", "1", "1"] in page.rows
    assert ["2025-06-04 click", "promoted", "-", "-", "-", "1", "1"] in page.rows
    assert not [cell for row in page.rows for cell in row if "None" in cell]
    assert "nan" not in page.text.lower()


def test_the_curves_go_back_over_the_main_line_with_intervals() -> None:
    """Nights up to this one, none after it; an error over users becomes a 95 % interval, and none stays none."""
    scored = {"auc": 0.75, "ne": 0.9, "calibration": 1.02, "count": 500, "positives": 50}
    found = records(
        next_day={"click": scored}, next_day_errors={"click": {"auc": 0.01, "ne": None}}, replayed_events=12
    )
    last, second = page_of("2025-06-04", found), page_of("2025-06-02", found)

    assert ["2025-06-04 click", "promoted", "0.7500 ± 0.0196", "0.9000", "1.0200", "500", "50"] in last.rows
    assert [row[0] for row in second.rows if row[0].startswith("2025-06")] == ["2025-06-01 click", "2025-06-02 click"]
    assert ["replayed", "12"] in last.rows
    intervals = [attributes for _, attributes in last.tags if attributes.get("class") == "interval"]
    assert len(intervals) == 2 * 3


def test_data_counts_time_and_padding_are_there() -> None:
    """Rows by fate, quarantine by reason with the most first, events, step split, padding, advice."""
    ingested = {"reasons": {"null_user": 1, "over_daily_cap": 1200}, "action_reasons": {"no_impression": 3}}
    page = page_of("2025-06-03", records(), ingest=ingested, train=trained())

    assert ["committed", "3"] in page.rows
    assert ["holdout", "1"] in page.rows
    reasons = [row for row in page.rows if row[0] in ("over_daily_cap", "null_user", "no_impression (actions)")]
    assert reasons == [["over_daily_cap", "1,200"], ["no_impression (actions)", "3"], ["null_user", "1"]]
    assert ["forward", "100.00", "16.7%"] in page.rows
    assert ["attention's places without a token", "4.8%"] in page.rows
    assert ["pack", "25.0%"] in page.rows
    assert ["training, in passing: click", "-", "0.5000", "-", "-", "77", "-"] in page.rows
    assert sum(row[0].startswith("training, in passing") for row in page.rows) == 1
    assert "No result was left by: evaluate, gate." in page.text


def test_checkpoints_scored_during_training_are_drawn() -> None:
    """Each with its step and whether training still went on."""
    holdout = [{"click": {"auc": auc, "ne": ne, "count": 30, "positives": 4}} for auc, ne in ((None, 0.99), (0.7, 0.8))]
    scored = [
        {"step": 10 * (n + 1), "final": n == 1, "scored_during_training": n == 0, "holdout": one}
        for n, one in enumerate(holdout)
    ]
    page = page_of("2025-06-04", records(checkpoints=scored))

    assert ["10", "yes", "-", "0.9900", "30"] in page.rows
    assert ["20 (final)", "no", "0.7000", "0.8000", "30"] in page.rows
    assert "holdout NE of click by step" in [attributes.get("aria-label") for _, attributes in page.tags]


def test_a_night_that_failed_at_once_has_a_page_too() -> None:
    """All sections stand there, with what is known; equal values give an equal page."""
    entries = example_entries()[:1]
    found = nights(entries)

    page = page_of("2025-06-01", found)

    assert "running" in page.text
    assert "Nothing was scored or trained." in page.text
    assert page.text == page_of("2025-06-01", found).text
