"""Prefect's server while a command or flow runs, so that no flow waits for it in silence.

Of any server that does not answer it is said so; a command's own is started again should it die (flows.own_server).
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import httpx
from prefect.settings import PREFECT_API_URL

logger = logging.getLogger("gr_core.flows")

LOOK_SECONDS = 5.0  # between two looks at the server
SILENT_SECONDS = 10.0  # without an answer, before it is said
REPEAT_SECONDS = 30.0  # and said again

_watched = threading.Lock()


class Own(Protocol):
    """A server that this command started (flows.own_server)."""

    running: bool

    @property
    def api_url(self) -> str:
        """Return its API's address."""

    def revive(self) -> None:
        """Start it again, should it have died."""


_own: list[Own] = []  # at most one; a flow of a worker has none, and never loads what it takes to start one


def remember(own: Own) -> None:
    """Have a command's own server revived while its flow is watched."""
    _own[:] = [own]


@contextmanager
def watched() -> Iterator[None]:
    """Say within the block when Prefect's server does not answer, and revive our own; once a process, however nested."""
    if not _watched.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    told = contextvars.copy_context()  # Prefect's settings
    watching = threading.Thread(target=told.run, args=(_watch, ended), name="prefect-server", daemon=True)
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
        for own in _own:
            own.revive()
        url = PREFECT_API_URL.value() or next((own.api_url for own in _own if own.running), None)
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
