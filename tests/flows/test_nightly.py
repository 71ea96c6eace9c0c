"""The nightly flow on a tiny feed: three nights, re-runs, retries, and what the day of a run is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import uuid
from datetime import UTC, datetime, timedelta
from datetime import date as Date
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from flows.backfill import backfill
from flows.cli import main
from flows.nightly import nightly
from flows.scheduling import day_before
from gr_core.errors import DaybreakError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.lake.lock import running_night
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import training
from gr_core.stages.training import run_training as train_in_a_child  # before the tests' own is put in its place
from tests.stand import until

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings(
        "default"
    ),  # a whole night runs MLflow, pandas and SQLAlchemy, with deprecations of theirs
]


def digest_of(home: Path) -> str:
    """Return a digest of every file of a home's nights and lake: name, bytes and modification time."""
    folders = [home / name for name in ("nights", "lake", "mlartifacts")]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    lines = [f"{path} {path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def flow_runs(name: str) -> list[Any]:
    """Return the flow runs of this name that the server knows, those of other tests' homes too."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    with get_client(sync_client=True) as client:
        return list(client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name]))))


def mlflow_runs(home: Path, name: str) -> list[Any]:
    """Return the MLflow runs of this name in a home."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [run for run in client.search_runs(experiments) if run.info.run_name == name]


def artifacts_of(run_id: uuid.UUID) -> list[Any]:
    """Return the artifacts of a flow run."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        return list(client.read_artifacts(artifact_filter=wanted))


@pytest.fixture(scope="module")
def three_nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Run three nights once; returns config, home and the nights."""
    folder = tmp_path_factory.mktemp("three")
    config = tiny.make(folder)
    home = folder / "home"
    days = [tiny.FIRST_DAY + timedelta(days=n) for n in range(3)]
    ran = [nightly(config=str(config), date=days[0], home=str(home))]
    shutil.copytree(home, folder / "first")
    return config, home, ran + [nightly(config=str(config), date=day, home=str(home)) for day in days[1:]]


def test_three_nights_add_up_and_each_starts_from_the_champion(
    three_nights: tuple[Path, Path, list[dict[str, Any]]],
) -> None:
    """Rows and events add up, versions rise, every night warm-starts from the champion of its time."""
    _, home, ran = three_nights
    entries = Journal(str(home / "lake" / "journal")).entries()

    for night in ran:
        rows = night["rows"]
        assert rows["read"] == tiny.ROWS_A_DAY + 3
        assert rows["read"] == sum(rows[k] for k in ("committed", "duplicates", "quarantined", "forgotten"))
        assert night["due_events"] == night["supervised_events"] + night["holdout_events"]
        assert night["state"] == "completed"
    assert [night["version"] for night in ran] == [1, 2, 3]
    assert ran[0]["new_events"] == ran[0]["rows"]["committed"]
    promoted = [night["version"] for night in ran if night["gate"] == "promoted"]
    chosen = champion(entries)
    assert chosen is not None
    assert chosen.version == promoted[-1]
    assert ran[0]["parent"] is None
    assert ran[2]["parent"] == max((v for v in promoted if v < 3), default=None)
    assert ran[1]["next_day"]["click"]["count"] > 0


def test_the_prefect_run_shows_its_day_and_figures(three_nights: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    """A run is named by its day and carries the table, the training progress, the night's page and the link to MLflow.

    Its parameters name config and day, and nothing that grows with the day's files (case A17).
    """
    _, home, _ = three_nights
    run = next(run for run in flow_runs(f"nightly {tiny.FIRST_DAY}") if str(home) in str(run.parameters))
    assert len(str(run.parameters)) < 1000
    found = {artifact.key: artifact for artifact in artifacts_of(run.id)}

    assert {
        "night",
        "night-page",
        "slices",
        "training",
        "mlflow-run",
        "training-split",
        "training-split-advice",
    } <= set(found)
    assert found["training"].data == 100.0
    assert "rows committed" in str(found["night"].data)
    assert "ms a step" in str(found["training-split"].data)
    page = home / "nights" / str(tiny.FIRST_DAY) / "page.html"
    assert page.as_uri() in str(found["night-page"].data)
    (logged,) = mlflow_runs(home, str(tiny.FIRST_DAY))
    artifact = Path(logged.info.artifact_uri.removeprefix("file://")) / "page.html"
    assert artifact.read_text() == page.read_text()
    assert logged.info.status == "FINISHED"


def test_a_nights_page_has_its_metrics_with_intervals(three_nights: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    """Step split, holdout and next-day metrics of the night are there, the latter with an interval over users."""
    _, home, ran = three_nights
    page = (home / "nights" / ran[1]["date"] / "page.html").read_text()

    value = f"{ran[1]['next_day']['click']['auc']:.4f}"
    assert re.search(rf"<td>{ran[1]['date']} click</td><td>{ran[1]['gate']}</td><td>{value} ± 0\.\d+</td>", page)
    assert "holdout, by the challenger: click" in page
    assert "A training step, mean of" in page
    assert "No result was left by" not in page


def test_a_finished_night_changes_nothing(three_nights: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    """Running a finished night again returns it as it was and touches no file."""
    config, home, ran = three_nights
    before = digest_of(home)

    again = nightly(config=str(config), date=tiny.FIRST_DAY, home=str(home))

    assert again == ran[0]
    assert digest_of(home) == before


def test_the_next_start_ends_what_a_killed_one_left_running_and_nothing_else(
    three_nights: tuple[Path, Path, list[dict[str, Any]]],
) -> None:
    """Its flow run is Crashed and its MLflow run KILLED (cases A5, B2), though this start has nothing to train.

    The runs of nights that ended stay Completed, whose process (this one) still lives: long after the end of its flow
    it holds neither a lock nor a record, so the next start runs at once.
    """
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    config, home, _ = three_nights
    parameters = {"config": str(config), "home": str(home), "date": str(tiny.FIRST_DAY)}
    ended = [run for run in flow_runs(f"nightly {tiny.FIRST_DAY}") if str(home) in str(run.parameters)]
    with get_client(sync_client=True) as client:
        dead = client.create_flow_run(nightly, parameters=parameters, state=Running())
    assert list((home / "flow-runs").iterdir()) == []
    assert running_night(str(home)) is None
    (home / "flow-runs" / f"{dead.id}.json").write_text('{"root": null}')
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    models.child(models.start_night("2025-06-09", params={}, tags={}), "train")

    nightly(**{**parameters, "date": tiny.FIRST_DAY})

    with get_client(sync_client=True) as client:
        assert client.read_flow_run(dead.id).state.is_crashed()
        assert [client.read_flow_run(run.id).state.name for run in ended] == ["Completed"] * len(ended)
    assert ended
    assert [run.info.status for run in mlflow_runs(home, "2025-06-09")] == ["KILLED"]
    assert {run.info.status for run in mlflow_runs(home, str(tiny.FIRST_DAY))} == {"FINISHED"}
    assert list((home / "flow-runs").iterdir()) == []


def test_days_handed_over_in_any_order_end_as_nights_in_order(
    three_nights: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Case E8 on real nights: [D+2, D, D+1]; D+1 fails, so D+2 is not begun; mended, all end as three nights in order did.

    D has been run before, which a backfill passes over: the home is a copy from after it.
    """
    _, calm, ran = three_nights
    days = [Date.fromisoformat(night["date"]) for night in ran]
    home = shutil.copytree(calm.parent / "first", tmp_path / "home")
    asked: dict[str, Any] = {"config": str(tiny.make(tmp_path)), "home": str(home), "days": [days[2], days[0], days[1]]}
    late = tmp_path / "raw" / "log" / f"date={days[1]}"
    late.rename(tmp_path / "later")

    with pytest.raises(DaybreakError, match=f"stopped at {days[1]}, day 2 of 3") as caught:
        backfill(**asked)
    begun = list(nights(Journal(str(home / "lake" / "journal")).entries()))
    (tmp_path / "later").rename(late)
    found = backfill(**asked)["nights"]

    assert f"not started: {days[2]}" in str(caught.value)
    assert begun == [str(days[0])]
    assert [night["attempts"] for night in found] == [1, 1, 1]
    for night, wanted in zip(found, ran, strict=True):
        for key in ("date", "version", "parent", "gate", "due_events", "new_events", "rows", "next_day"):
            assert night[key] == wanted[key], key
    digests = [
        [
            json.loads(next((h / "nights" / str(day)).glob("checkpoint-*/state.json")).read_text())["digest"]
            for day in days
        ]
        for h in (home, calm)
    ]
    assert digests[0] == digests[1]


def test_ctrl_c_in_training_leaves_no_run_running_or_finished(
    three_nights: tuple[Path, Path, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGINT: exit 1, one object, the journal says cancelled, and MLflow KILLED at once (case B2)."""
    config, home, _ = three_nights
    day = tiny.FIRST_DAY + timedelta(days=3)
    tiny.write_day(config.parent / "raw", day)

    def states() -> list[str]:
        runs = mlflow_runs(home, str(day))
        own = {run.info.run_id for run in runs}
        runs += [run for run in mlflow_runs(home, "train") if run.data.tags["mlflow.parentRunId"] in own]
        return [run.info.status for run in runs]

    def interrupted(run: Path, *arguments: Any, **named: Any) -> dict[str, Any]:
        until(lambda: states() == ["RUNNING"] * 2, what="the night's MLflow run")
        os.kill(os.getpid(), signal.SIGINT)
        return train_in_a_child(run, *arguments, **named)  # which is started, and ended with the night

    monkeypatch.setattr(training, "run_training", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        status = main(["nightly", "--config", str(config), "--home", str(home), "--date", str(day), "--json"])
    finally:
        signal.signal(signal.SIGINT, before)

    assert status == 1
    assert "interrupted" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert nights(Journal(str(home / "lake" / "journal")).entries())[str(day)].state == "cancelled"
    assert states() == ["KILLED"] * 2
    assert flow_runs(f"nightly {day}")[0].state.is_final()


def test_a_retried_flow_redoes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register fails in the flow and in its retry: a Retry from the UI ends it; trained once, one MLflow run (case A1)."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.states import AwaitingRetry, Pending

    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    trained: list[Path] = []
    real_training, real_register = training.run_training, MlflowStore.register
    failures = iter([RuntimeError("registry is away")] * 2)
    files: list[dict[Path, int]] = []

    def counted(run: Path, *arguments: Any, **named: Any) -> None:
        trained.append(run)
        real_training(run, *arguments, **named)

    def register_that_fails_twice(*arguments: Any, **named: Any) -> int:
        files.append({path: path.stat().st_mtime_ns for path in (home / "nights").glob("*/checkpoint-*/*")})
        for error in failures:
            raise error
        return real_register(*arguments, **named)

    monkeypatch.setattr(training, "run_training", counted)
    monkeypatch.setattr(MlflowStore, "register", register_that_fails_twice)

    flow = nightly.with_options(retries=1)
    parameters = {"config": str(config), "home": str(home), "date": tiny.FIRST_DAY}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(flow, parameters=parameters, state=Pending())
    with pytest.raises(RuntimeError, match="registry is away"):
        run_flow(flow, flow_run=run, parameters=parameters)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run.id).state.is_failed()
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)  # what the button does
        again = client.read_flow_run(run.id)
    night = run_flow(flow, flow_run=again, parameters=parameters)

    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run.id).state.is_completed()
    assert len(trained) == 1
    assert files[0] == files[1] == files[2]
    assert night["state"] == "completed"
    assert night["attempts"] == 3
    assert [found.info.status for found in mlflow_runs(home, "train")] == ["FINISHED"]
    entries = Journal(str(home / "lake" / "journal")).entries()
    assert [entry.kind for entry in entries].count("registered") == 1
    assert nights(entries)[str(tiny.FIRST_DAY)].is_finished


def test_a_forced_stage_stands_beside_the_result_and_has_its_digest(
    three_nights: tuple[Path, Path, list[dict[str, Any]]],
) -> None:
    """`--force train` of a finished night trains from its pinned parent again: equal digest, result untouched (F12)."""
    config, home, _ = three_nights
    day = tiny.FIRST_DAY + timedelta(days=1)
    (state,) = (home / "nights" / str(day)).glob("checkpoint-*/state.json")
    before = state.read_bytes()

    forced = nightly(config=str(config), date=day, home=str(home), force="train")

    assert forced["forced"]["equal"] is True
    assert state.read_bytes() == before


def test_the_day_comes_from_the_scheduled_start_in_the_lakes_zone() -> None:
    """Late or repeated runs keep their day; the zone decides which day it is (case A4)."""
    start = datetime(2025, 6, 2, 3, tzinfo=UTC)

    assert str(day_before(start, "UTC")) == "2025-06-01"
    assert str(day_before(start, "America/New_York")) == "2025-05-31"


def test_a_late_run_and_its_rerun_keep_the_scheduled_day(tmp_path: Path) -> None:
    """A run scheduled for 03:00, executed a day later and run again days after, is about the same day (case A4)."""
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext
    from prefect.flow_engine import run_flow
    from prefect.states import Scheduled

    config = tiny.make(tmp_path, days=1)
    when = datetime(tiny.FIRST_DAY.year, tiny.FIRST_DAY.month, tiny.FIRST_DAY.day, 3, tzinfo=UTC) + timedelta(days=1)
    parameters = {"config": str(config), "home": str(tmp_path / "home")}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(nightly, parameters=parameters, state=Scheduled(scheduled_time=when))

    first = run_flow(nightly, flow_run=run, parameters=parameters)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Scheduled(scheduled_time=when + timedelta(days=3)), force=True)
        again = client.read_flow_run(run.id)
    second = run_flow(nightly, flow_run=again, parameters=parameters)

    assert FlowRunContext.get() is None
    assert first["date"] == second["date"] == str(tiny.FIRST_DAY)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run.id).name == f"nightly {tiny.FIRST_DAY}"


@pytest.mark.parametrize("bad", ["2025-02-30", "June", "2025-06-01T03:00:00+02:00"])
def test_a_date_that_is_none_is_rejected_before_anything_is_written(tmp_path: Path, bad: str) -> None:
    """The form's date must be a date (case A14)."""
    from prefect.exceptions import ParameterTypeError

    config = tiny.make(tmp_path, days=1)

    with pytest.raises(ParameterTypeError):
        nightly(config=str(config), date=bad, home=str(tmp_path / "home"))

    assert not (tmp_path / "home").exists()


def test_an_empty_date_is_yesterday(tmp_path: Path) -> None:
    """`{}` and `{"date": null}` both mean the day before the scheduled start (case A14)."""
    yesterday = day_before(datetime.now(UTC), "UTC")
    config = tiny.make(tmp_path, days=0)
    tiny.write_day(tmp_path / "raw", yesterday)

    one = nightly(config=str(config), home=str(tmp_path / "one"))
    two = nightly(config=str(config), home=str(tmp_path / "one"), date=None)

    assert one["date"] == two["date"] == str(yesterday)
