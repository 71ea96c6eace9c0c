"""Backfill: days in order, one failure stops the rest; older days start from their predecessors and are never promoted.

And on the same nights: the next-night check, and a model evaluated on one of them.
"""

from __future__ import annotations

import itertools
import json
import sys
from datetime import UTC, datetime, timedelta
from datetime import date as Date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from flows.backfill import backfill, oldest_first
from flows.cli import main
from flows.evaluate import evaluate
from flows.nightly import nightly
from gr_core.config import load_config
from gr_core.errors import DataContractError, DaybreakError, UsageError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import outcome

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.filterwarnings(
        "default"
    ),  # a whole night runs MLflow, pandas and SQLAlchemy, with deprecations of theirs
]

DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(5)]
ROWS = 300
Told = list[list[dict[str, str]]]
Ran = tuple[Path, Path, dict[Date, dict[str, Any]]]


def test_days_run_oldest_first_whatever_their_order() -> None:
    """Case E8: a list in any order, or a range; a day twice is one day."""
    assert oldest_first(None, None, [DAYS[2], DAYS[0], DAYS[1], DAYS[0]]) == DAYS[:3]
    assert oldest_first(DAYS[0], DAYS[2]) == DAYS[:3]
    for start, end, days, told in (
        (DAYS[0], None, [], "both --start and --end"),
        (None, None, [], "both --start and --end"),
        (DAYS[1], DAYS[0], [], "swap them"),
        (DAYS[0], DAYS[1], [DAYS[0]], "not both"),
    ):
        with pytest.raises(UsageError, match=told):
            oldest_first(start, end, days)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Keep what is published of a backfill, instead of Prefect."""
    published: Told = []
    monkeypatch.setattr(sys.modules[backfill.fn.__module__], "publish_backfill", published.append)
    return published


def fake_nights(monkeypatch: pytest.MonkeyPatch, outcomes: dict[Date, list[Any]]) -> list[Date]:
    """Let each start of a day's night end as listed: an error to raise, or a state; returns the days as they start."""
    started: list[Date] = []

    def night(*, date: Date, mode: str, **_: Any) -> dict[str, Any]:
        started.append(date)
        ends = outcomes.get(date, [])
        end = ends.pop(0) if ends else "completed"
        if isinstance(end, Exception):
            raise end
        return {"date": str(date), "mode": mode, "state": end, "gate": "promoted"}

    monkeypatch.setattr(sys.modules[backfill.fn.__module__], "nightly", night)
    return started


@pytest.mark.parametrize("broken", [DataContractError("no file", where="day"), RuntimeError("no disk")], ids=["2", "1"])
def test_a_failure_stops_the_later_days_and_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, told: Told, broken: Exception
) -> None:
    """Case E8: D+1 fails, D+2 is not started; the error keeps its exit status and names every day, as the table does."""
    started = fake_nights(monkeypatch, {DAYS[1]: [broken]})

    with pytest.raises(DaybreakError) as caught:
        backfill.fn(days=[DAYS[2], DAYS[0], DAYS[1]])

    assert started == DAYS[:2]
    assert caught.value.exit_code == getattr(broken, "exit_code", 1)
    message = str(caught.value)
    assert f"backfill stopped at {DAYS[1]}, day 2 of 3: " in message
    assert str(broken) in message
    assert f"done: {DAYS[0]} promoted; not started: {DAYS[2]}; " in message
    assert [(row["date"], row["state"]) for row in told[0]] == [
        (str(DAYS[0]), "completed"),
        (str(DAYS[1]), "failed"),
        (str(DAYS[2]), "not started"),
    ]


def test_a_day_that_runs_elsewhere_is_waited_for(monkeypatch: pytest.MonkeyPatch, told: Told, tmp_path: Path) -> None:
    """The days after it start from what it leaves; and where it failed there, it is taken up here."""
    started = fake_nights(monkeypatch, {DAYS[0]: ["running", "running", "completed"]})
    module, looks = sys.modules[backfill.fn.__module__], iter([str(DAYS[0]), None, "2025-01-01"])
    monkeypatch.setattr(module, "running_night", lambda _home, *, watch: next(looks))
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)

    found = backfill.fn(start=DAYS[0], end=DAYS[1], home=str(tmp_path))

    assert started == [DAYS[0], DAYS[0], DAYS[0], DAYS[1]]
    assert [night["state"] for night in found["nights"]] == ["completed"] * 2
    assert list(looks) == []
    assert len(told[0]) == 2


@pytest.fixture(scope="module")
def ran(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Backfill days 3 and 1, then 2 late; a bad model of day 4 is promoted by hand; day 5 follows. The nights by day."""
    del prefect_server
    folder = tmp_path_factory.mktemp("late")
    config, home = tiny.make(folder, days=0), folder / "home"
    for day in DAYS:
        poison(tiny.write_day(folder / "raw", day, rows=ROWS), really=day == DAYS[3])
    same: dict[str, Any] = {"config": str(config), "home": str(home)}
    where = ("--config", str(config), "--home", str(home))
    found = backfill(days=[DAYS[2], DAYS[0]], **same)["nights"]
    found += backfill(start=DAYS[1], end=DAYS[2], **same)["nights"]
    found.append(nightly(date=DAYS[3], overrides=["gate.margin=0", "train.dense_learning_rate=0.04"], **same))
    assert main(["promote", "4", "--reason", "looks right", *where]) == 0
    found.append(nightly(date=DAYS[4], overrides=["next_night.min_positives=20"], **same))
    return config, home, {Date.fromisoformat(night["date"]): night for night in found}


def poison(path: Path, *, really: bool) -> None:
    """Turn every click of a day's file."""
    table = pq.read_table(path)
    turned = pa.array([clicked != really for clicked in table["clicked"].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("clicked"), "clicked", turned), path)


def test_days_after_the_champions_are_nights_like_any_other(ran: Ran) -> None:
    """Cases E8 and A10: one by one, oldest first, each from the champion as the day before left it."""
    _, home, found = ran

    assert [found[day]["version"] for day in (DAYS[0], DAYS[2], DAYS[3])] == [1, 2, 4]
    assert [found[day]["gate"] for day in (DAYS[0], DAYS[2])] == ["promoted"] * 2
    assert [found[day]["parent"] for day in (DAYS[0], DAYS[2], DAYS[3])] == [None, 1, 2]
    assert [found[day]["mode"] for day in (DAYS[0], DAYS[3])] == ["backfill", "nightly"]
    records = nights(Journal(str(home / "lake" / "journal")).entries())
    ended = [records[str(day)] for day in (DAYS[0], DAYS[2], DAYS[1], DAYS[3], DAYS[4])]
    for before, after in itertools.pairwise(ended):
        assert (before.finished_us or 0) <= after.opened_us
        assert len(before.attempts) == 1


def test_an_older_day_starts_from_its_predecessor_and_is_never_promoted(ran: Ran) -> None:
    """Case G1: registered, held with the reason, champion as it was; the finished day was passed over."""
    config, home, found = ran
    entries, late = Journal(str(home / "lake" / "journal")).entries(), found[DAYS[1]]

    assert (late["version"], late["parent"], late["gate"]) == (3, 1, "held")
    assert f"gate.date: data day {DAYS[1]} is not after the champion's {DAYS[2]}" in late["reasons"]
    assert late["rows"]["committed"] == ROWS
    then = champion([entry for entry in entries if entry.night not in (str(DAYS[3]), str(DAYS[4]))])
    assert then is not None
    assert then.version == 2
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    assert models.version(3).night == str(DAYS[1])
    shown = outcome.status(load_config(config), str(home), DAYS[4], now_us=0)
    assert [night["date"] for night in shown["nights"]] == [str(day) for day in DAYS]


def test_what_came_late_is_due_once_on_the_champions_lineage(ran: Ran) -> None:
    """The next night learns the late day, and what matured since; so its lineage 1, 2, 4 had every event once."""
    config, _, found = ran
    night = found[DAYS[3]]
    matured = last_half_hour(config, DAYS[2])

    assert night["parent"] == 2
    assert night["due_events"] == 2 * ROWS + matured
    # what was new in the late night is new no more; the clicks of its last half hour matured when day 3 was over
    assert night["new_events"] == ROWS + matured + last_half_hour(config, DAYS[1])
    assert found[DAYS[1]]["new_events"] == ROWS


def test_a_bad_champion_is_rolled_back_in_its_next_night(ran: Ran) -> None:
    """Promoted by hand, worse on the next day's events: gone back from, told in the night, Prefect, MLflow and its page."""
    config, home, found = ran
    night = found[DAYS[4]]
    checked = night["next_night"]

    assert found[DAYS[3]]["gate"] == "held"
    assert (night["parent"], night["gate"], checked["rolled_back"]) == (4, "held", True)
    assert (checked["champion"], checked["previous"]) == (4, 2)
    assert night["reasons"][0].startswith("gate.lineage: it was warm-started from version 4")
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    assert models.aliases() == {"champion": 2, "previous": 1, "challenger": 5}
    run = models._client.get_run(models.version(5).run)
    assert run.data.metrics["next_night/difference/click"] == checked["figures"]["difference"]
    assert f"rolled back; {checked['reason']}" in published("next-night-check", str(DAYS[4]))
    assert "worse, rolled back; NE of click +" in (home / "nights" / str(DAYS[4]) / "page.html").read_text()
    shown = outcome.status(load_config(config), str(home), DAYS[4], now_us=0)
    assert shown["champion"]["version"] == 2
    assert any("next-night check" in one["where"] for one in shown["findings"])


def test_evaluating_a_model_again_adds_nothing(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    """Case G14: the command and the flow say the same; one value a key in MLflow, in a run of its own; no file changes."""
    config, home, found = ran
    where = ("--config", str(config), "--home", str(home))
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    client, night = models._client, models.run_of(str(DAYS[3]))
    assert night is not None
    ended, weights = client.get_run(night).info.end_time, weights_of(home)
    told = []
    for _ in range(2):
        capsys.readouterr()
        assert main(["evaluate", "--model", "2", "--date", str(DAYS[3]), *where, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    value = evaluate(model="2", date=DAYS[3], config=str(config), home=str(home))

    assert told == [value, value]
    assert set(value) == {"model", "version", "date", "metrics", "count", "trained_on"}
    parent = found[DAYS[3]]
    assert (parent["parent"], value["version"], value["count"]) == (2, 2, parent["new_events"])
    assert value["metrics"]["next_day/auc/click"] == parent["next_day"]["click"]["auc"]
    (run,) = client.search_runs([models.experiment], "attributes.run_name = 'evaluate version 2'")
    assert (run.data.tags["mlflow.parentRunId"], run.info.status) == (night, "FINISHED")
    for key in value["metrics"]:
        assert len(client.get_metric_history(run.info.run_id, key)) == (value["metrics"][key] is not None), key
    assert client.get_run(night).info.end_time == ended
    assert weights_of(home) == weights
    assert f"version 2 on the {value['count']} new events" in published("evaluation", str(DAYS[3]))
    assert main(["evaluate", "--model", "99", *where, "--json"]) == 2


def weights_of(home: Path) -> dict[Path, int]:
    """Return when each file of the nights and the lake was written."""
    files = [path for folder in ("nights", "lake") for path in (home / folder).rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def published(key: str, about: str) -> str:
    """Return the description of the newest artifact of a key that tells of something."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return next(text for artifact in found if about in (text := str(artifact.description)))


def last_half_hour(config: Path, day: Date) -> int:
    """Return how many events of a day's file, each id once, were shown too late for their clicks to be final that day."""
    table = pq.read_table(config.parent / "raw" / "log" / f"date={day}" / "part-0.parquet")
    rows = dict(zip(table["id"].to_pylist(), table["ts"].to_pylist(), strict=True))
    border = datetime(day.year, day.month, day.day, 23, 30, tzinfo=UTC).timestamp() * 1000
    return sum(shown >= border for shown in rows.values())
