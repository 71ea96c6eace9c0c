"""Compare on nights of a tiny feed: both versions on the same holdout rows, in one lineage and across two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gr_core.config import load_config
from gr_core.data import vocabulary
from gr_core.errors import ConfigError, UsageError
from gr_core.lake.journal import Journal
from gr_core.report.compared import render_comparison
from gr_core.stages import comparing, gating, judging, served
from tests.erased import FIRST, SECOND, THIRD, entries_of, snapshot
from tests.plain import run

World = tuple[Path, Path, Path]
RATE = "train.dense_learning_rate=0.03"


@pytest.fixture(scope="module")
def compared(poisoned: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a config and a home with versions 1, 2 (from 1) and 3: from 1 too, at another rate, and judged against 2."""
    config, home = poisoned[0], tmp_path_factory.mktemp("compared") / "home"
    shutil.copytree(poisoned[2], home)
    night, done = run(config, home, THIRD, RATE, parent=1, stop_after="evaluate")
    payload = judging.registration(night, 3, done["train"], done["vocabulary"])
    night.journal.append("registered", night.key, payload, at_us=1)
    rest = (done["pack"]["holdout"], done["vocabulary"], done["ingest"], done["sequences"])
    with pytest.MonkeyPatch.context() as patch:  # the registry has no version 3
        patch.setattr(served, "score", lambda *arguments: served.Served(scored=arguments[-1](True)))
        gating.gate(night, {"version": 3}, done["train"], *rest)
    return config, home


TOLD: list[str] = []  # what the last comparison said that it does


def compare(config: Path, home: Path, a: int, b: int, *overrides: str) -> dict[str, Any]:
    """Compare two versions; the object survives JSON."""
    value = comparing.compare(load_config(config, list(overrides)), str(home), a, b, tell=TOLD.append)
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    return value


def test_versions_of_two_lineages_are_compared_as_the_gate_did(compared: tuple[Path, Path]) -> None:
    """Version 2 is no ancestor of 3, so its ids are looked up anew; NE and upper end are those of the gate's decision."""
    config, home = compared
    before = snapshot(home)

    TOLD.clear()
    value = compare(config, home, 2, 3)

    assert [line.split(" ", 2)[:2] for line in TOLD] == [
        ["version", "3"],
        ["version", "2"],
        ["comparing", f"{value['data']['a']['holdout']['events']:,}"],
        ["comparing", "slices:"],
    ]
    figures = next(e.payload["figures"] for e in reversed(entries_of(home)) if e.kind == "decided")
    assert figures["rows_challenger"] == figures["rows_champion"]
    ne = value["metrics"]["holdout/ne/click"]
    assert (ne["a"], ne["b"]) == (figures["ne_champion"], figures["ne_challenger"])
    assert ne["delta"] == pytest.approx(figures["ne_champion"] * figures["difference"])
    assert ne["high"] == pytest.approx(figures["ne_champion"] * figures["upper_bound"])
    assert ne["low"] < ne["delta"] < ne["high"]
    assert value["metrics"]["holdout/count/click"]["a"] == figures["count"]
    assert value["metrics"]["holdout/calibration/click"]["low"] is None
    auc = value["metrics"]["holdout/auc/click"]
    assert auc["low"] < auc["delta"] < auc["high"]
    assert value["data"]["a"]["holdout"] == value["data"]["b"]["holdout"]
    assert value["data"]["a"]["holdout"]["rows"] == figures["rows_champion"]
    assert snapshot(home) == before


def test_a_comparison_the_other_way_round_has_the_opposite_sign(compared: tuple[Path, Path]) -> None:
    """Differences are b - a, on the same rows."""
    one, other = compare(*compared, 1, 2), compare(*compared, 2, 1)

    assert one["data"]["a"]["holdout"]["night"] == str(SECOND)
    assert one["data"]["a"]["holdout"] == other["data"]["a"]["holdout"]
    for key, value in one["metrics"].items():
        if key.startswith("holdout/") and value["delta"] is not None:
            assert value["delta"] == -other["metrics"][key]["delta"], key
    ne, back = one["metrics"]["holdout/ne/click"], other["metrics"]["holdout/ne/click"]
    assert ne["low"] < ne["delta"] < ne["high"]
    assert back["low"] < back["delta"] < back["high"]


def test_slices_are_the_days_of_the_holdout_and_add_up(compared: tuple[Path, Path]) -> None:
    """Each lake day has its own metrics and interval; their counts are those of the whole."""
    value = compare(*compared, 2, 3)

    ne = [one for one in value["slices"] if one["key"] == "holdout/ne/click" and one["slice"].startswith("day=")]
    assert [one["slice"] for one in ne] == [f"day={day}" for day in (FIRST, SECOND, THIRD)][-len(ne) :]
    assert len(ne) > 1
    assert sum(one["count"] for one in ne) == value["metrics"]["holdout/count/click"]["a"]
    assert list(ne[0]) == ["slice", "key", "a", "b", "delta", "low", "high", "count"]


def test_config_and_data_differences_are_told(compared: tuple[Path, Path]) -> None:
    """Config by dotted key; of the data dates, bound, counts, parents."""
    value = compare(*compared, 2, 3)

    assert list(value) == ["a", "b", "metrics", "slices", "config", "data"]
    assert value["config"] == {"train.dense_learning_rate": [0.01, 0.03]}
    a, b = value["data"]["a"], value["data"]["b"]
    assert (a["date"], a["night"], a["commit"], a["cutoff"]) == (str(SECOND), str(SECOND), 2, "2025-06-03T00:00:00Z")
    assert (b["date"], b["night"], b["commit"]) == (str(THIRD), f"{THIRD}+parent-1", 3)
    assert (a["parent"], a["parents"], b["parents"]) == (1, [1], [1])
    assert a["rows"]["committed"] > 0
    assert b["rows"]["read"] == b["rows"]["committed"] + b["rows"]["duplicates"] > 0
    assert compare(*compared, 1, 2)["config"] == {}


def test_without_common_rows_there_is_no_difference(compared: tuple[Path, Path], tmp_path: Path) -> None:
    """Where packs are gone, each night's own figures stand side by side, without delta or interval."""
    config, home = compared[0], tmp_path / "home"
    shutil.copytree(compared[1], home)
    for entry in [e for e in entries_of(home) if e.kind == "opened"]:
        manifest = home / "nights" / entry.night / "manifests" / "pack-holdout.json"
        pack = json.loads(manifest.read_text())
        pack["result"]["uri"] = str(tmp_path / "gone")
        manifest.write_text(json.dumps(pack))

    value = compare(config, home, 2, 3)

    assert value["data"]["a"]["holdout"] is None
    assert value["slices"] == []
    ne = value["metrics"]["holdout/ne/click"]
    assert (ne["a"], ne["delta"], ne["low"], ne["high"]) == (None, None, None, None)  # 2 was promoted by no gate here
    assert ne["b"] == pytest.approx(compare(*compared, 2, 3)["metrics"]["holdout/ne/click"]["b"])
    assert "without differences" in shown(value)


def test_models_of_different_features_share_no_rows(
    compared: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A version without a table that the other one has is shown beside it, and the log says why that is all."""
    config, home = compared[0], tmp_path / "home"
    shutil.copytree(compared[1], home)
    made = next(e for e in entries_of(home) if e.kind == "registered" and e.payload["version"] == 2)
    words = vocabulary.load(Path(made.payload["vocabulary"]))
    tables = {"item_id": words.tables["item_id"]}
    fewer = replace(words, tables=tables, version=vocabulary._version(tables))
    (tmp_path / "words").mkdir()
    vocabulary.save(fewer, tmp_path / "words")
    payload = {**made.payload, "version": 4, "vocabulary": str(tmp_path / "words")}
    journal = Journal(str(home / "lake" / "journal"))
    opened = next(e.payload for e in journal.entries() if e.kind == "opened" and e.night == made.night)
    journal.append("opened", "other", {**opened, "key": "other", "parent": None}, at_us=1)
    journal.append("registered", "other", payload, at_us=1)

    value = compare(config, home, 3, 4)

    assert value["data"]["b"]["holdout"] is None
    assert "version 4 knows no ids of ['surface']" in caplog.text


def shown(value: dict[str, Any]) -> str:
    """Return what a person reads."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_comparison(value))
    return capture.get()


def test_a_person_reads_tables(compared: tuple[Path, Path]) -> None:
    """Metrics with signs, what they were scored on, slices, and only what differs in data and config."""
    text = shown(compare(*compared, 2, 3))

    assert f"of night {THIRD}+parent-1" in text
    assert "version 2" in text
    lines = [line.split() for line in text.splitlines()]
    ne = next(words for words in lines if words[:1] == ["holdout/ne/click"])
    assert len(ne) == 6
    assert all(word[0] in "+-" for word in ne[3:])
    assert any(words[:2] == [f"day={THIRD}", "ne/click"] for words in lines)
    assert ["train.dense_learning_rate", "0.0100", "0.0300"] in lines
    assert not any(words[:1] == ["parents"] for words in lines)
    assert "config: no difference" in shown(compare(*compared, 1, 2))


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (1, 1, "two different versions, got 1 twice"),
        (1, 9, "version 9 is no registered version; the newest are 1, 2, 3"),
    ],
    ids=["same", "unknown"],
)
def test_what_cannot_be_compared_is_one_error(compared: tuple[Path, Path], a: int, b: int, match: str) -> None:
    """Exit status 2, and the home is as it was."""
    before = snapshot(compared[1])
    with pytest.raises(UsageError, match=match):
        compare(*compared, a, b)
    with pytest.raises(ConfigError, match=r"lake.num_buckets"):
        compare(*compared, 1, 2, "lake.num_buckets=4")
    assert snapshot(compared[1]) == before
