"""The Prefect server that a command starts for itself where none is set: it outlives signals, and dies with the command."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import httpx
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, get_current_settings

from flows import watching

logger = logging.getLogger("gr_core.flows")

APP = "prefect.server.api.server:create_app"
RESTARTS = 3
SETTLE_SECONDS = 4.0
"""How long the end of a command waits at most for its server to have on record how its task runs ended."""
_LOOK_SECONDS = 0.1
_OPEN = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]


class OwnServer(SubprocessASGIServer):
    """The ephemeral server of a command: in a session of its own, ended with this process, started again should it die."""

    _restarts = 0
    _since = datetime.max.replace(tzinfo=UTC)
    """When it was started first: task runs before that are another command's."""

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        self._since = min(self._since, datetime.now(UTC))
        server = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        return subprocess.Popen(
            [sys.executable, "-m", "flows.ephemeral", APP, str(self.port)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **server, **settings},
        )

    def revive(self) -> None:
        """Start the server again on its port and database, should it have died; Prefect's client goes on asking."""
        process = self.server_process
        if not self.running or process is None or process.poll() is None or self._restarts >= RESTARTS:
            return
        if process.stdin is not None:
            process.stdin.close()
        self._restarts += 1
        logger.warning("Prefect's server of this command died; it is started again at %s", self.address)
        self.server_process = self._run_uvicorn_command()

    def stop(self) -> None:
        """End the server, and with it its pipe, once it has written down how this command's task runs ended."""
        process = self.server_process
        if process is not None and process.poll() is None:
            self._settle()
        super().stop()
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _settle(self) -> None:
        """Wait until no task run of this command is open; its last states reach the server as events, after the runs.

        This process has sent all of them by now (Prefect's queues are drained before exit hooks run), and the server,
        once ended, forgets those that it has not read. Bounded: a run whose task was killed stays open.
        """
        asked = {
            "task_runs": {
                "state": {"type": {"any_": _OPEN}},
                "expected_start_time": {"after_": self._since.isoformat()},
            }
        }
        deadline = time.monotonic() + SETTLE_SECONDS
        with contextlib.suppress(httpx.HTTPError, ValueError), httpx.Client(timeout=SETTLE_SECONDS) as client:
            while time.monotonic() < deadline:
                answer = client.post(f"{self.api_url}/task_runs/count", json=asked)
                if answer.status_code != httpx.codes.OK or not answer.json():
                    return
                time.sleep(_LOOK_SECONDS)


def use() -> None:
    """Have Prefect start our server where it would start its ephemeral one: where no API URL is set."""
    if not PREFECT_API_URL.value() and None not in SubprocessASGIServer._instances:
        watching.remember(OwnServer())
