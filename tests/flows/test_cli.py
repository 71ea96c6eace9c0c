"""The `daybreak` command: exit statuses, one JSON object, and bad input that changes nothing."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.errors import DataContractError
from gr_core.lake.journal import Journal, nights
from gr_core.lake.lock import night_lock
from tests import databases, plain
from tests.stand import until

ROOT = Path(__file__).parent.parent.parent
DAY = str(tiny.FIRST_DAY)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json in this process; returns exit status and the one object."""
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def break_file(folder: Path, how: str) -> None:
    """Spoil the first day's raw file in one way."""
    path = folder / "raw" / "log" / f"date={DAY}" / "part-0.parquet"
    table = pq.read_table(path)
    match how:
        case "unreadable":
            path.write_bytes(path.read_bytes()[:200])
        case "no_parquet":
            path.write_text("id,uid\n1,2\n")
        case "missing_column":
            pq.write_table(table.drop_columns(["item"]), path)
        case "mistyped_column":
            pq.write_table(table.set_column(3, "ts", pa.array(["yesterday"] * table.num_rows)), path)
        case "missing_day":
            path.unlink()
        case "zero_bytes":
            path.write_bytes(b"")


BAD_INPUT = [
    ("unreadable", "part-0.parquet"),
    ("no_parquet", "part-0.parquet"),
    ("missing_column", "item"),
    ("mistyped_column", "ts"),
    ("missing_day", DAY),
    ("zero_bytes", "part-0.parquet"),
]


@pytest.mark.parametrize(("how", "named"), BAD_INPUT, ids=[how for how, _ in BAD_INPUT])
def test_bad_input_is_one_error_before_any_state_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, named: str
) -> None:
    """A bad file, column or day ends with exit 2 and one error that names it; the home is not even made."""
    config = tiny.make(tmp_path, days=1)
    break_file(tmp_path, how)
    home = tmp_path / "home"

    status, value = run(capsys, "nightly", "--config", str(config), "--home", str(home), "--date", DAY)

    assert status == 2
    assert value["error"]["type"] == "DataContractError"
    assert named in value["error"]["message"]
    assert not home.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nightly", "--date", "2025-02-30"], "2025-02-30"),
        (["nightly", "--date", "9999-12-31"], "9999-12-31"),
        (["check", "--date", "0001-01-01"], "2000 to 2261"),
        (["nightly", "--nonsense"], "nonsense"),
        (["nightly", "--set", "train.lr=1"], "train.lr"),
        (["nightly", "--next", "0"], "--next"),
        (["nightly", "--date", "2001-01-01", "--force", "train"], "no night 2001-01-01"),
        (["nightly", "--date", "2001-01-01", "--force", "everything"], "everything"),
        (["backfill", "--start", "2025-06-02", "--end", "2025-06-01"], "--end"),
        (["status", "--config", "nowhere.toml"], "nowhere.toml"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_exit_2_and_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with a command, there is one JSON object that names it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DAYBREAK_HOME", str(tmp_path / "home"))

    status, value = run(capsys, *words)

    assert status == 2
    assert named in value["error"]["message"]


def test_config_show_prints_the_resolved_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults and overrides are in it, and the fingerprint is that of the config."""
    config = tiny.make(tmp_path, days=0)

    status, value = run(capsys, "config", "show", "--config", str(config), "--set", "pack.seed=7")

    assert status == 0
    assert value["config"]["pack"]["seed"] == 7
    assert value["config"]["source"]["missing_day"] == "stop"
    assert value["fingerprint"].startswith("sha256:")


def test_status_of_a_home_without_nights_is_empty_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking changes nothing."""
    config = tiny.make(tmp_path, days=0)

    status, value = run(capsys, "status", "--config", str(config), "--home", str(tmp_path / "home"))

    assert status == 0
    assert value["nights"] == []
    assert value["champion"] is None
    assert not (tmp_path / "home").exists()


def test_a_second_start_of_a_running_night_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one process runs the night, another start ends at once and trains nothing (case A3)."""
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"

    with night_lock(str(home), DAY):
        status, value = run(capsys, "nightly", "--config", str(config), "--home", str(home), "--date", DAY)

    assert status == 0
    assert value["state"] == "running"
    assert "already running" in value["reasons"][0]
    assert not (home / "lake").exists()


def start(config: Path, home: Path, day: str) -> subprocess.Popen[str]:
    """Start `daybreak nightly` as its own process; what it logs is in `log_of`."""
    words = ["-m", "flows.cli", "nightly", "--config", str(config), "--home", str(home), "--date", day, "--json"]
    variables = {key: value for key, value in os.environ.items() if key != "PREFECT_HOME"}  # its own: below the home
    if not (home / "prefect").exists():
        databases.prefect(home / "prefect")
    with log_of(home).open("a") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def log_of(home: Path) -> Path:
    """Return where the nights of a home log, beside it."""
    return home.with_name(f"{home.name}.log")


def processes_of(home: Path) -> list[str]:
    """Return the command lines of processes that work for a home: trainings, evaluators and Prefect's server."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
        if str(home).encode() in command or f"PREFECT_HOME={home}/".encode() in variables:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def wait_for_training(night: subprocess.Popen[str], home: Path) -> None:
    """Wait until the night's training is about to start."""
    deadline = time.monotonic() + 240
    while not (home / "nights" / DAY / "RUN.json").exists():
        assert night.poll() is None, "the night ended before it trained"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def mlflow_states(home: Path) -> dict[str, str]:
    """Return the states of a home's MLflow runs by name, as its database has them."""
    if not (home / "mlflow.db").exists():
        return {}
    with contextlib.closing(sqlite3.connect(home / "mlflow.db")) as database:
        return dict(database.execute("SELECT name, status FROM runs"))


@pytest.mark.prefect
def test_a_terminated_night_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    """SIGTERM in training, to the whole group as systemd sends it: exit 1, one object, the journal says cancelled, no process is left.

    MLflow says KILLED at once (case B2); SIGINT ends a night in the same way (test_nightly).
    """
    config = tiny.make(tmp_path, days=1)
    home = tmp_path / "home"
    night = start(config, home, DAY)
    wait_for_training(night, home)
    until(lambda: mlflow_states(home) == {DAY: "RUNNING", "train": "RUNNING"}, what="the night's MLflow run")

    os.killpg(night.pid, signal.SIGTERM)
    out = night.communicate(timeout=60)[0]

    assert night.returncode == 1
    assert "interrupted" in json.loads(out)["error"]["message"]
    assert nights(Journal(str(home / "lake" / "journal")).entries())[DAY].state == "cancelled"
    assert mlflow_states(home) == {DAY: "KILLED", "train": "KILLED"}
    assert processes_of(home) == []


@pytest.mark.prefect
def test_a_night_killed_in_training_is_taken_up_and_ends_as_if_undisturbed(tmp_path: Path) -> None:
    """After kill -9 in training the next start redoes only what is missing, to the same digest; the dead run is Crashed (A5).

    MLflow says RUNNING until then, and FINISHED when the night is (case B2).
    """
    config = tiny.make(tmp_path, days=1)
    home, calm = tmp_path / "home", tmp_path / "calm"
    first = start(config, home, DAY)
    wait_for_training(first, home)
    until(lambda: mlflow_states(home).get("train"), what="the night's MLflow run")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert first.stdout is not None
    first.stdout.close()
    until(lambda: not processes_of(home), what="the end of what the killed night had started")
    manifests = {p: p.stat().st_mtime_ns for p in (home / "nights" / DAY / "manifests").iterdir()}
    record = nights(Journal(str(home / "lake" / "journal")).entries())[DAY]
    assert not record.is_finished
    assert mlflow_states(home) == {DAY: "RUNNING", "train": "RUNNING"}

    again = start(config, home, DAY)
    _, stages = plain.run(config, calm, tiny.FIRST_DAY)  # without Prefect
    out = again.communicate(timeout=280)[0]

    night, undisturbed = json.loads(out), stages["finish"]
    assert again.returncode in (0, 3), log_of(home).read_text()[-5000:]
    assert night["attempts"] == 2
    assert {path: path.stat().st_mtime_ns for path in manifests} == manifests
    with contextlib.closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        states = database.execute("SELECT state_type, id FROM flow_run ORDER BY created").fetchall()
        asked = "SELECT name FROM task_run WHERE state_type <> 'COMPLETED' AND flow_run_id = ?"
        unsettled = database.execute(asked, (states[-1][1],)).fetchall()
        number = database.execute("SELECT count(*) FROM task_run WHERE flow_run_id = ?", (states[-1][1],)).fetchone()
    assert [state for state, _ in states] == ["CRASHED", "COMPLETED"]
    assert number[0] > 10
    assert unsettled == [], "the command ended before its server had on record how its task runs ended"
    assert mlflow_states(home) == {DAY: "FINISHED", "train": "FINISHED", "evaluate": "FINISHED"}
    for key in ("gate", "version", "rows", "due_events", "supervised_events", "new_events", "holdout_events"):
        assert night[key] == undisturbed[key], key
    checkpoints = [
        json.loads(next((h / "nights" / DAY).glob("checkpoint-*/state.json")).read_text()) for h in (home, calm)
    ]
    assert checkpoints[0]["digest"] == checkpoints[1]["digest"]


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_bad_input_that_the_flow_meets_is_said_without_a_traceback(tmp_path: Path) -> None:
    """The days of a backfill after its first are looked at inside the flow: one clear line there too."""
    from flows.nightly import nightly

    config, shown = tiny.make(tmp_path, days=0), io.StringIO()
    handler = logging.StreamHandler(shown)
    logging.getLogger("prefect.flow_runs").addHandler(handler)
    try:
        with pytest.raises(DataContractError):
            nightly(config=str(config), date=tiny.FIRST_DAY, home=str(tmp_path / "home"))
    finally:
        logging.getLogger("prefect.flow_runs").removeHandler(handler)
    assert f"DataContractError('day {DAY} is missing" in shown.getvalue()
    assert "Traceback" not in shown.getvalue()


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("default")  # a whole night runs MLflow, pandas and SQLAlchemy, with deprecations of theirs
def test_after_a_bad_day_the_next_night_runs_and_an_empty_day_trains_what_is_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A day that failed its check leaves the next night alone; a day without a row still trains what came due."""
    config = tiny.make(tmp_path, days=3)
    break_file(tmp_path, "missing_column")
    second, third = (str(tiny.FIRST_DAY + timedelta(days=n)) for n in (1, 2))
    common = ("--config", str(config), "--home", str(tmp_path / "home"))

    bad, _ = run(capsys, "nightly", *common, "--date", DAY)
    good, night = run(capsys, "nightly", *common, "--date", second)
    tiny.write_day(tmp_path / "raw", tiny.FIRST_DAY + timedelta(days=2), rows=0)
    empty, last = run(capsys, "nightly", *common, "--date", third)
    again, same = run(capsys, "nightly", *common, "--date", third)

    assert bad == 2
    assert good in (0, 3)
    assert night["rows"]["committed"] == tiny.ROWS_A_DAY
    assert last["rows"] == dict.fromkeys(last["rows"], 0)
    assert last["due_events"] > 0
    assert empty in (0, 3)
    assert (again, same) == (empty, last)
