"""Operations on a real Prefect server with a real worker: a schedule fires, a night is cancelled, killed, taken up again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from datetime import date as Date
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.schedules import Interval

import tests.tiny as tiny
from flows.cli import main
from flows.nightly import nightly
from flows.scheduling import day_before
from gr_core.lake.journal import Journal, NightRecord, nights
from gr_core.lake.lock import running_night
from tests.stand import PATIENCE, POOL, ROOT, Stand, until

pytestmark = [pytest.mark.prefect, pytest.mark.filterwarnings("default")]

CANCELLED_SECONDS = 30.0  # issue 6: no process of the night is left after that
# Trained slowly enough to be met in training, in many small steps that are all saved
SLOW = ["model.width=128", "model.num_layers=8", "pack.token_budget=64", "train.save_every_steps=2"]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Start a server with a pool of processes; schedules are looked at every second."""
    quick = {f"PREFECT_SERVER_SERVICES_SCHEDULER_{key}": "1" for key in ("LOOP_SECONDS", "MIN_RUNS")}
    clears = {"PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY": "true"}  # as infra/deploy.sh and `up` have it
    made = Stand(tmp_path_factory.mktemp("stand"), **quick, **clears)
    try:
        made.serve()
        assert made.prefect("work-pool", "create", POOL, "--type", "process").returncode == 0
        yield made
    finally:
        made.close()


def record_of(home: Path, night: str) -> NightRecord:
    """Return what the journal knows of a night."""
    return nights(Journal(str(home / "lake" / "journal")).entries())[night]


def mlflow_states(home: Path) -> dict[str, str]:
    """Return the states of a home's MLflow runs by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_name: run.info.status for run in client.search_runs(experiments)}


def processes_of(home: Path) -> list[int]:
    """Return the training and scoring processes of a home."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"gr_core." in command and str(home).encode() in command:
                found.append(int(path.parent.name))
    return found


def newest_step(home: Path, night: str) -> int:
    """Return the step of a night's newest whole checkpoint while it trains; 0 where there is none."""
    found = (home / "nights" / night).glob("checkpoint-*.steps/step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def engine_of(worker: int) -> int:
    """Return the process that executes the flow run of a worker that has one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == worker and b"prefect.engine" in (path.parent / "cmdline").read_bytes():
                return int(path.parent.name)
    raise AssertionError(f"worker {worker} executes no run")


def started_by_schedule(stand: Stand, deployment: uuid.UUID) -> Any:
    """Wait for the run that a deployment's schedule starts, and pause the schedule; returns the run."""

    def started() -> Any:
        with stand.client() as client:
            return next((run for run in client.read_flow_runs() if run.state.is_running()), None)

    run = until(started, what="the start by schedule")
    with stand.client() as client:
        (made,) = client.read_deployment(deployment).schedules
        client.update_deployment_schedule(deployment, made.id, active=False)
    return run


def cancel_in_training(stand: Stand, run: Any, home: Path, day: str) -> None:
    """Cancel a run: within 30 s no process, the lock is free, MLflow says KILLED, no half checkpoint counts (case A9)."""
    stand.cancel(run.id)
    asked = time.monotonic()
    until(lambda: not processes_of(home), what="the end of training")
    until(lambda: running_night(str(home)) is None, what="the lock")
    assert time.monotonic() - asked < CANCELLED_SECONDS
    assert stand.ended(run.id).name == "Cancelled"
    assert record_of(home, day).state == "cancelled"
    assert mlflow_states(home) == {day: "KILLED", "train": "KILLED"}
    assert not list((home / "nights" / day).glob("checkpoint-*/state.json"))


def kill_in_training(stand: Stand, run: Any, worker: int, home: Path, day: str) -> None:
    """Kill -9 flow and worker once the run has saved a further step: nothing goes on, and Prefect knows nothing of it."""
    before = newest_step(home, day)
    until(lambda: newest_step(home, day) > before, what="training, taken up again")
    flow = engine_of(worker)
    for process in (worker, flow):
        os.kill(process, signal.SIGKILL)
    until(lambda: not processes_of(home), what="the end of what the killed flow had started")
    assert stand.state_of(run.id).is_running()


def test_a_night_that_its_schedule_started_is_cancelled_killed_and_taken_up_again(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schedule of seconds fires by itself; cancel, then kill -9 of flow and worker in training, then the next start.

    The day is the one before the scheduled start. The next start marks the killed run Crashed, and goes on from the last
    whole checkpoint (cases A5, A8). Meanwhile `status` tells the stage and its steps. The schedule's own parameters win
    over the deployment's: the config and overrides that train here are the schedule's (case A13).
    """
    config, home = tiny.make(stand.folder, days=0), stand.folder / "home"
    start = datetime.now(UTC) + timedelta(seconds=12)
    day = str(day_before(start, "UTC"))
    tiny.write_day(stand.folder / "raw", Date.fromisoformat(day), rows=1000)
    words = ("--config", str(config), "--home", str(home), *(word for key in SLOW for word in ("--set", key)))
    parameters = {"config": str(config), "home": str(home), "overrides": SLOW}
    # again, should a busy machine miss the first
    schedule = Interval(timedelta(minutes=1), anchor_date=start, parameters=parameters)
    others = {**parameters, "config": "conf/none.toml", "overrides": []}
    deployment = stand.deploy(nightly, name="night", parameters=others, concurrency_limit=1, schedule=schedule)
    worker = stand.work()

    def shown(status: int) -> Any:
        assert main(["status", *words, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    run = started_by_schedule(stand, deployment)
    assert (run.deployment_id, run.auto_scheduled, run.name) == (deployment, True, f"nightly {day}")
    assert run.parameters == parameters
    until(lambda: newest_step(home, day), what="the first checkpoint")
    assert json.loads((home / "nights" / day / "RUN.json").read_text())["config"]["model"]["width"] == 128
    (night,) = shown(0)["nights"]
    assert night["state"] == "running"
    assert "train" in night["running"]["stages"]
    assert 0 < night["running"]["step"] < night["running"]["steps"]
    assert night["seconds"]["train"] > 0

    cancel_in_training(stand, run, home, day)
    assert "cancelled" in shown(1)["findings"][0]["message"]  # a stopped night is an error until it is run again

    with stand.client() as client:
        again = client.create_flow_run_from_deployment(deployment, parameters={**parameters, "date": day})
    kill_in_training(stand, again, worker.pid, home, day)

    command = [sys.executable, "-m", "flows.cli", "nightly", *words, "--date", day, "--json"]
    done = subprocess.run(command, env=stand.variables, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert done.returncode in (0, 3), done.stderr
    assert json.loads(done.stdout)["attempts"] == 3
    assert "going on from" in (home / "nights" / day / "train.log").read_text()
    assert stand.state_of(again.id).is_crashed()
    assert stand.state_of(run.id).name == "Cancelled"
    assert mlflow_states(home) == {day: "FINISHED", "train": "FINISHED", "evaluate": "FINISHED"}


def test_a_paused_schedule_stays_paused_when_it_is_deployed_again(stand: Stand, tmp_path: Path) -> None:
    """Every deployment of prefect.yaml deploys; a second time leaves one schedule, paused, with its overrides (case A13).

    Those are the schedule's own parameters: its runs have them over the deployment's, as the flow's types. Where the file
    lists no schedules none is left.
    """
    listed = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (entry,) = (one for one in listed["deployments"] if one["name"] == "nightly")
    own = {"date": Date(2025, 6, 1), "overrides": ["train.dense_learning_rate=0.002"]}
    entry["schedules"] = [{**entry["schedules"][0], "parameters": own}]
    wanted = {**own, "date": "2025-06-01"}  # YAML has dates, JSON has not
    file, bare = tmp_path / "prefect.yaml", tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump(listed))
    bare.write_text(yaml.safe_dump({**listed, "deployments": [{**entry, "schedules": []}]}))
    created = stand.prefect("work-pool", "create", "gpu", "--type", "process")
    deployed = stand.prefect("deploy", "--all", "--prefect-file", str(file))
    assert created.returncode == deployed.returncode == 0, deployed.stdout + deployed.stderr
    with stand.client() as client:
        names = {one.name for one in client.read_deployments()}
        found = client.read_deployment_by_name("nightly/nightly")
        (schedule,) = found.schedules
        assert (schedule.schedule.cron, schedule.active) == ("30 4 * * *", True)

        def scheduled() -> Any:
            return next((run for run in client.read_flow_runs() if run.deployment_id == found.id), None)

        run = until(scheduled, what="a run by schedule")
        client.update_deployment_schedule(found.id, schedule.id, active=False)
    assert {one["name"] for one in listed["deployments"]} <= names
    assert run.parameters == {"config": "conf/world.toml", **wanted}
    assert own.items() <= nightly.validate_parameters(run.parameters).items()

    assert stand.prefect("deploy", "-n", "nightly", "--prefect-file", str(file)).returncode == 0
    with stand.client() as client:
        again = client.read_deployment_by_name("nightly/nightly")
    assert [(one.id, one.active, one.slug) for one in again.schedules] == [(schedule.id, False, "every-night")]
    assert again.schedules[0].parameters == schedule.parameters == wanted
    assert again.parameters == found.parameters == {"config": "conf/world.toml"}

    assert stand.prefect("deploy", "-n", "nightly", "--prefect-file", str(bare)).returncode == 0
    with stand.client() as client:
        assert client.read_deployment_by_name("nightly/nightly").schedules == []
