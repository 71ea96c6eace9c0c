"""Prefect's server beside a command: it dies with it and not before, is started again, and its silence is told."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import own_server, watching
from flows.own_server import OwnServer
from flows.watching import watched
from tests.stand import free_port, until

ROOT = Path(__file__).parent.parent.parent
APP = "tests.answering:create_app"
STARTER = """
import sys, time
from flows import own_server
own_server.APP = sys.argv[1]
server = own_server.OwnServer(int(sys.argv[2]))
server.start(60)
print(server.server_process.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnServer]:
    """Start a server of this process."""
    monkeypatch.setattr(own_server, "APP", APP)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = OwnServer(free_port())
    made.start(60)
    yield made
    made.stop()


def test_a_command_ends_when_its_task_runs_are_on_record(server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last states reach the server as events; the wait for them is bounded, since a killed task's run stays open."""
    asked: list[dict[str, Any]] = []
    counts = [2, 1, 0]

    def post(_client: httpx.Client, _url: str, *, json: dict[str, Any]) -> httpx.Response:
        asked.append(json["task_runs"])
        return httpx.Response(200, json=counts[len(asked) - 1] if len(asked) <= len(counts) else 1)

    monkeypatch.setattr(httpx.Client, "post", post)
    monkeypatch.setattr(own_server, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(own_server, "_LOOK_SECONDS", 0.01)
    server._settle()
    settled = len(asked)
    server.stop()

    assert settled == 3
    assert server.server_process is None
    assert settled + 1 < len(asked) < 1000
    assert "RUNNING" in asked[0]["state"]["type"]["any_"]
    assert asked[0]["expected_start_time"]["after_"] < datetime.now(UTC).isoformat()


def test_a_server_that_died_is_started_again_at_its_place(server: OwnServer, caplog: pytest.LogCaptureFixture) -> None:
    """After kill -9 of the server the next look starts it again on its port, with a word; its session is its own."""
    first = server.server_process
    assert first is not None
    assert os.getsid(first.pid) != os.getsid(0)
    server.revive()
    assert server.server_process is first

    first.kill()
    first.wait()
    server.revive()

    assert "it is started again" in caplog.text

    def answers() -> bool:
        try:
            return httpx.get(f"{server.api_url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    until(answers, what="the new server")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which only Linux has")
def test_a_server_ends_with_the_command_that_was_killed() -> None:
    """Kill -9 of the command alone: nobody tells the server, and it ends all the same."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTER, APP, str(free_port())]
    starter = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert is_alive(pid)

    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()

    until(lambda: not is_alive(pid), what="the end of the server")


def test_silence_is_told_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server that does not answer is named, with how long; when it answers again, that is said too."""
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watching, "SILENT_SECONDS", 0.2)

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    with (
        caplog.at_level(logging.INFO, logger="gr_core.flows"),
        temporary_settings({PREFECT_API_URL: api}),
        watched(),
        watched(),  # of a subflow
    ):
        until(lambda: f"Prefect's server at {api} has not answered for" in caplog.text, seconds=20, what="the word")
        back = HTTPServer(("127.0.0.1", port), Healthy)
        serving = threading.Thread(target=back.serve_forever, daemon=True)
        serving.start()
        until(lambda: "answers again" in caplog.text, seconds=20, what="the word")
        text = caplog.text
        back.shutdown()
        serving.join()
        back.server_close()
    assert text.count("has not answered") == 1
