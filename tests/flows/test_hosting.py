"""Detached processes: recorded, watched, ended with all that they started, and nothing else."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows import hosting, up
from flows.cli import main
from flows.hosting import Record, Server, ServerError
from gr_core.errors import UsageError
from tests import tiny

WAITING = "import time; time.sleep(60)"
# A server whose child is in a session of its own, as Prefect's worker starts flow runs
PARENT = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {WAITING!r}], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def start(folder: Path, code: str, name: str = "one") -> Server:
    return hosting.start(folder, name, ["-c", code], dict(os.environ), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder whose processes are ended after the test."""
    yield tmp_path
    hosting.end(tmp_path, [])


def child_of(server: Server) -> psutil.Process:
    """Return the process that PARENT started."""
    hosting.wait_until(lambda: bool(hosting.tail(server.log)), [server], "its child is named", 30)
    return psutil.Process(int(hosting.tail(server.log)))


def test_a_record_is_read_as_it_was_written(folder: Path) -> None:
    """Processes and what was noted; without a file there is none; another release's is refused with the remedy."""
    assert hosting.read(folder) is None
    record = Record((start(folder, WAITING),), {"prefect": "http://127.0.0.1:1"})
    hosting.write(folder, record)
    assert hosting.read(folder) == record
    assert record.alive()

    told = json.loads((folder / "servers.json").read_text()) | {"format": 99}
    (folder / "servers.json").write_text(json.dumps(told))
    with pytest.raises(UsageError, match="has format 99, this release reads 1"):
        hosting.read(folder)


def test_a_process_id_that_was_given_away_is_left_alone(folder: Path) -> None:
    """The id of a living process with another start time names nobody: not alive, and not ended."""
    neighbour = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stranger = Server("worker", neighbour.pid, psutil.Process(neighbour.pid).create_time() - 3600, str(folder / "log"))

    assert not Record((stranger,), {}).alive()
    assert hosting.end(folder, [stranger]) == []
    assert neighbour.poll() is None
    neighbour.communicate(b"\n")


def test_a_child_in_a_session_of_its_own_is_ended_too(folder: Path) -> None:
    """The whole tree goes, whatever sessions it made."""
    server = start(folder, PARENT)
    child = child_of(server)

    assert hosting.end(folder, [server]) == [{"name": "one", "pid": server.pid}]
    assert server.process() is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_server_left_behind_is_found(folder: Path) -> None:
    """A night whose worker was killed has no parent any more; the mark in its environment still names the folder."""
    server = start(folder, PARENT)
    child = child_of(server)
    os.kill(server.pid, signal.SIGKILL)
    hosting.wait_until(lambda: server.process() is None, [], "it is dead", 30)
    assert child.is_running()

    assert hosting.end(folder, [server]) == [{"name": "left behind", "pid": child.pid}]
    assert hosting.marked(folder) == []


def test_waiting_for_a_process_that_ends_shows_its_log(folder: Path) -> None:
    """The error has the last lines of what it printed; a condition that stays away is told after its time."""
    server = start(folder, "raise SystemExit('address already in use')", "mlflow")
    with pytest.raises(ServerError, match=r"(?s)mlflow ended before it answers.*address already in use"):
        hosting.wait_until(lambda: False, [server], "it answers", 30)

    with pytest.raises(ServerError, match=r"it answers: not so after 0\.2 s"):
        hosting.wait_until(lambda: False, [start(folder, WAITING)], "it answers", 0.2)


def test_two_commands_at_once_are_refused(folder: Path) -> None:
    """The second one says so instead of starting everything twice."""
    with (
        hosting.one_at_a_time(folder),
        pytest.raises(UsageError, match="another up or down works in"),
        hosting.one_at_a_time(folder),
    ):
        pass


def test_a_taken_port_is_refused_before_anything_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2: the port, and the variable that names another one; no process, no record."""
    words = ["--config", str(tiny.make(folder, days=1)), "--home", str(folder / "home"), "--json"]
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        patch.delenv("PREFECT_API_URL", raising=False)
        for name, other in (("prefect", "mlflow"), ("mlflow", "prefect")):
            assert main(["up", *words, f"--{name}-port", port, f"--{other}-port", "4199"]) == 2
            message = json.loads(capsys.readouterr().out)["error"]["message"]
            assert f"port {port} of 127.0.0.1 cannot be used" in message
            assert f"make up {name.upper()}_PORT=N" in message
    servers = up.servers_folder(str(folder / "home"))
    assert hosting.read(servers) is None
    assert hosting.marked(servers) == []


def test_up_takes_over_the_port_of_its_own_server_where_another_ended(folder: Path) -> None:
    """What is left of the last `up` is ended before it starts anew: its port is not another's."""
    listening = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True); time.sleep(60)"
    left, gone = start(folder, listening, "mlflow"), start(folder, "pass", "prefect")
    hosting.wait_until(lambda: bool(hosting.tail(left.log)) and gone.process() is None, [left], "it listens", 30)
    port = int(hosting.tail(left.log))
    asked = argparse.Namespace(prefect_port=4198, mlflow_port=port)
    record = Record((gone, left), {"prefect": "http://127.0.0.1:4198", "mlflow": f"http://127.0.0.1:{port}"})

    assert not record.alive()
    up._refuse(asked, record)
    hosting.end(folder, [left])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 cannot be used"):
            up._refuse(asked, record)


@pytest.mark.parametrize("port", ["0", "-1", "70000", "http"])
def test_a_port_that_is_none_is_refused(folder: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, before anything is made."""
    words = ["--config", str(tiny.make(folder, days=1)), "--home", str(folder / "home"), "--json"]

    assert main(["up", *words, "--prefect-port", port]) == 2
    assert "a port is a number from 1 to 65535" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not (folder / "home").exists()


def test_a_damaged_record_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with the file and the way on; without it, what carries the mark is ended."""
    words = ["--config", str(tiny.make(folder, days=1)), "--home", str(folder / "home"), "--json"]
    servers = up.servers_folder(str(folder / "home"))
    servers.mkdir(parents=True)
    (servers / "servers.json").write_text('{"format": ')
    left = start(servers, WAITING)

    assert main(["down", *words]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert f"{servers / 'servers.json'} is damaged" in message

    (servers / "servers.json").unlink()
    assert main(["down", *words]) == 0
    assert left.process() is None


@pytest.mark.parametrize("name", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_servers_of_a_teams_own_are_not_doubled(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment names a server, nights go there: `up` refuses, by the variable's name."""
    words = ["--config", str(tiny.make(folder, days=1)), "--home", str(folder / "home"), "--json"]
    monkeypatch.setenv(name, "http://team:1")

    assert main(["up", *words]) == 2
    assert f"{name} is set (http://team:1)" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_down_where_nothing_is_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and makes no folder."""
    words = ["--config", str(tiny.make(folder, days=1)), "--home", str(folder / "home")]

    assert main(["down", *words]) == 0
    assert capsys.readouterr().out == "nothing was up\n"
    assert not (folder / "home").exists()
