"""Drift to promotion with nobody at hand: tastes change, nights notice, a new lineage trains beside them and wins."""

from __future__ import annotations

import json
import threading
from datetime import date as Date
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from flows import full_retrain as retrains
from flows.cli import main
from flows.nightly import nightly
from gr_core.lake.journal import Journal, NightRecord, champion, nights
from gr_core.lake.lineage import Lineage
from gr_core.lake.lock import RETRAIN_LOCK, night_lock
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import training
from tests.flows.test_nightly import artifacts_of, flow_runs, mlflow_runs

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("default"),  # as in test_nightly
]

SHIFT_DAY, NIGHTS = 6, 10
ROWS = 400


def write_day(root: Path, number: int) -> None:
    """Write a raw day on which items of even numbers are liked, since the shift those of odd ones."""
    day = tiny.FIRST_DAY + timedelta(days=number - 1)
    path = tiny.write_day(root, day, rows=ROWS)
    table, rng = pq.read_table(path), np.random.default_rng(number)
    liked = np.array(table["item"].to_pylist()) % 2 == int(number >= SHIFT_DAY)
    clicked = rng.random(len(table)) < np.where(liked, 0.85, 0.15)
    clicked[-3:] = clicked[:3]  # the rows that repeat
    table = table.set_column(table.column_names.index("clicked"), "clicked", pa.array(clicked))
    pq.write_table(table, path)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, Any]:
    """Run nights one after the other, and nothing else; one night runs while the full retrain does."""
    folder = tmp_path_factory.mktemp("shift")
    config, home = tiny.make(folder, days=0), folder / "home"
    for number in range(1, NIGHTS + 1):
        write_day(folder / "raw", number)
    settings = ["train.retrain_window_days=3", "drift.baseline_nights=3", "lake.num_buckets=1"]
    same: dict[str, Any] = {"config": str(config), "home": str(home), "overrides": settings}
    beside: list[dict[str, Any]] = []

    def night(number: int) -> dict[str, Any]:
        return dict(nightly(date=tiny.FIRST_DAY + timedelta(days=number - 1), **same))

    real = retrains.prepare

    def prepare(*arguments: Any) -> Any:
        made = real(*arguments)
        if not beside:  # a night of another start, while the full retrain is about to ask the gate
            beside.append(night(len(ran) + 2))
        return made

    ran: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrains, "prepare", prepare)
        while len(ran) + len(beside) < NIGHTS and not (beside and ran[-1]["date"] > beside[0]["date"]):
            ran.append(night(len(ran) + len(beside) + 1))
    return {"config": config, "home": home, "nights": ran, "beside": beside, "set": settings}


def retrain_of(home: Path) -> NightRecord:
    """Return the one full retrain of a home."""
    entries = Journal(str(home / "lake" / "journal")).entries()
    (found,) = [record for record in nights(entries).values() if record.mode == "full_retrain"]
    return found


def test_a_shift_of_taste_ends_in_a_promoted_full_retrain_with_nobody_at_hand(shifted: dict[str, Any]) -> None:
    """Shift on day 6, trigger by day 8, a new lineage over all days, the night that passed meanwhile, promotion."""
    entries = Journal(str(shifted["home"] / "lake" / "journal")).entries()
    anew, beside = retrain_of(shifted["home"]), shifted["beside"][0]
    kinds = [one["kind"] for one in (nights(entries)[anew.date].status or {})["drift"]["triggers"]]
    day = Date.fromisoformat(anew.date)

    assert "ne" in kinds
    assert SHIFT_DAY <= (day - tiny.FIRST_DAY).days + 1 <= 8
    assert anew.state == "completed"
    assert (anew.decision, anew.reasons) == ("promote", ("gate passed",))
    trained = [window for window in anew.windows if window["state"] == "trained"]
    ends = [str(day - timedelta(days=6)), str(day - timedelta(days=3)), str(day), beside["date"]]
    assert [window["through"] for window in trained] == ends
    assert beside["state"] == "completed", "a night ran while the full retrain did"
    assert Lineage.of(entries).parents[anew.version] is None


def test_the_next_night_starts_from_the_new_lineage(shifted: dict[str, Any]) -> None:
    """It is due exactly what came since; its drift counts days from the new root, and starts nothing again."""
    home, last = shifted["home"], shifted["nights"][-1]
    entries = Journal(str(home / "lake" / "journal")).entries()
    anew = retrain_of(home)
    before = shifted["nights"][-2]
    told = (nights(entries)[last["date"]].status or {})["drift"]

    assert last["parent"] == anew.version
    assert last["due_events"] == last["new_events"], "what the nights before had scored, the new lineage was trained on"
    assert before["parent"] != anew.version
    assert told["metrics"]["drift/days_since_full"] == 1
    assert told["triggers"] == []
    chosen = champion(entries)
    assert chosen is not None
    assert chosen.version in (anew.version, last["version"])


def test_status_mlflow_and_prefect_tell_of_it(shifted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Status shows the retrain's windows and outcome, MLflow drift/* of each night, Prefect a table of the night's drift."""
    home, anew = shifted["home"], retrain_of(shifted["home"])
    assert main(["status", "--config", str(shifted["config"]), "--home", str(home), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    shown = next(night for night in status["nights"] if night["mode"] == "full_retrain")

    assert (shown["date"], shown["gate"], shown["parent"]) == (anew.date, "promoted", None)
    assert shown["through"] == shifted["beside"][0]["date"], "it caught up with the night beside it"
    place = status["nights"].index(shown)
    assert [night["date"] for night in status["nights"][:place]] == sorted(
        night["date"] for night in status["nights"] if night["date"] <= shown["through"] and night is not shown
    )
    assert [window["state"] for window in shown["windows"]] == ["trained"] * 4
    assert shown["supervised_events"] == sum(window["supervised_events"] for window in shown["windows"])
    assert not [found for found in status["findings"] if "full retrain" in found["message"]]
    (logged,) = mlflow_runs(home, anew.date)
    assert logged.data.metrics["drift/triggers"] >= 1
    assert logged.data.metrics["drift/ne_change"] > 0.05
    (of_retrain,) = mlflow_runs(home, anew.key)
    assert of_retrain.info.status == "FINISHED"
    assert MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny").aliases()["previous"]
    run = next(run for run in flow_runs(f"nightly {anew.date}") if str(home) in str(run.parameters))
    drift = next(one for one in artifacts_of(run.id) if one.key == "drift")
    assert "next-day NE" in str(drift.description)


@pytest.mark.parametrize("other", ["2025-06-02+full-retrain", None], ids=["of another day", "of its own"])
def test_a_start_beside_a_running_one_waits_as_a_night_does(
    shifted: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    other: str | None,
) -> None:
    """Beside one of another day it waits for its end and runs, with its own outcome; beside its own it ends at once."""
    home, day = str(shifted["home"]), "2025-06-03"
    words = ["full-retrain", "--config", str(shifted["config"]), "--home", home, "--through", day, "--json"]
    words += [word for key in shifted["set"] for word in ("--set", key)]
    ran = {"date": day, "state": "completed", "gate": "held", "reasons": ["as told"]}
    monkeypatch.setattr(retrains, "run_retrain", lambda *_: ran)
    monkeypatch.setattr(retrains, "WAIT_SECONDS", 0.05)
    caplog.set_level("INFO")
    held, ended = threading.Event(), threading.Event()

    def run_beside() -> None:
        with night_lock(home, other or f"{day}+full-retrain", name=RETRAIN_LOCK):
            held.set()
            while "waits for it" not in caplog.text and not ended.wait(0.02):
                pass

    beside = threading.Thread(target=run_beside)
    beside.start()
    assert held.wait(10)
    try:
        status = main(words)
    finally:
        ended.set()
        beside.join()
    told = json.loads(capsys.readouterr().out)

    if other is None:
        assert (status, told["state"]) == (0, "running")
        assert told["reasons"] == [f"full retrain {day}+full-retrain is already running; this start ends"]
    else:
        assert (status, told) == (3, ran)
        assert f"full retrain {other} is running in this home; {day}+full-retrain waits for it" in caplog.text


def test_a_finished_full_retrain_trains_nothing_again(
    shifted: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again it says that it is finished; days that no night covers are refused before anything begins (case F12)."""
    same = ["--config", str(shifted["config"]), "--home", str(shifted["home"]), "--json"]
    same += [word for key in shifted["set"] for word in ("--set", key)]
    entries = Journal(str(shifted["home"] / "lake" / "journal")).entries()
    monkeypatch.setattr(training, "run_training", None)

    assert main(["full-retrain", "--through", retrain_of(shifted["home"]).date, *same]) == 0
    said = capsys.readouterr()
    assert "is finished" in said.err
    assert json.loads(said.out)["gate"] == "promoted"
    assert main(["full-retrain", "--through", "2025-06-20", *same]) == 2
    assert f"2025-06-01 to {shifted['nights'][-1]['date']}" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert Journal(str(shifted["home"] / "lake" / "journal")).entries() == entries
