"""Prefect's server while a command or flow runs, so that no flow waits for it in silence.

A command's own server outlives signals to its process group, and is started again should it die; of any server that does
not answer it is said so.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, get_current_settings

logger = logging.getLogger("gr_core.flows")

APP = "prefect.server.api.server:create_app"
RESTARTS = 3
LOOK_SECONDS = 5.0  # between two looks at the server
SILENT_SECONDS = 10.0  # without an answer, before it is said
REPEAT_SECONDS = 30.0  # and said again

_watched = threading.Lock()


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
        died = self.running and self.server_process is not None and self.server_process.poll() is not None
        if not died or self._restarts >= RESTARTS:
            return
        self._restarts += 1
        logger.warning("Prefect's server of this command died; it is started again at %s", self.address)
        self.server_process = self._run_uvicorn_command()

    def stop(self) -> None:
        """End the server, and with it its pipe."""
        process = self.server_process
        super().stop()
        if process is not None and process.stdin is not None:
            process.stdin.close()


def use_own_server() -> None:
    """Have Prefect start our server where it would start its ephemeral one: where no API URL is set."""
    if not PREFECT_API_URL.value() and None not in SubprocessASGIServer._instances:
        OwnServer()


@contextmanager
def watched() -> Iterator[None]:
    """Say within the block when Prefect's server does not answer, and revive our own; once a process, however nested."""
    if not _watched.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(ended,), name="prefect-server", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        _watched.release()


def _watch(ended: threading.Event) -> None:
    heard = said = time.monotonic()
    silent = False
    while not ended.wait(LOOK_SECONDS):
        own = SubprocessASGIServer._instances.get(None)
        if isinstance(own, OwnServer):
            own.revive()
        url = PREFECT_API_URL.value() or (own.api_url if own is not None and own.running else None)
        if url is None:
            continue
        now = time.monotonic()
        if _answers(url):
            if silent:
                logger.info("Prefect's server at %s answers again", url)
            heard, silent = now, False
        elif now - heard >= SILENT_SECONDS and not (silent and now - said < REPEAT_SECONDS):
            logger.warning(
                "Prefect's server at %s has not answered for %.0f s; the stage that runs goes on, the next one waits: start "
                "the server again, or stop this run and run it again later",
                url,
                now - heard,
            )
            said, silent = now, True


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LOOK_SECONDS).status_code < 500
    except httpx.HTTPError:
        return False
