"""The Prefect server that a command starts for itself where none is set: it outlives signals, and dies with the command."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, get_current_settings

from flows import watching

logger = logging.getLogger("gr_core.flows")

APP = "prefect.server.api.server:create_app"
RESTARTS = 3


class OwnServer(SubprocessASGIServer):
    """The ephemeral server of a command: in a session of its own, ended with this process, started again should it die."""

    _restarts = 0

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
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
        """End the server, and with it its pipe."""
        process = self.server_process
        super().stop()
        if process is not None and process.stdin is not None:
            process.stdin.close()


def use() -> None:
    """Have Prefect start our server where it would start its ephemeral one: where no API URL is set."""
    if not PREFECT_API_URL.value() and None not in SubprocessASGIServer._instances:
        watching.remember(OwnServer())
