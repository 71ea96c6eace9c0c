"""One writer of a home on S3, across machines: a lock object that its holder renews, taken by conditional put.

The object names the holder and changes with every beat. A holder that is killed stops beating: on its own machine the
next start sees the dead process and takes the lock at once, elsewhere after LEASE_SECONDS by the store's own clock. A
live holder is never robbed: whoever replaces the object must give the ETag it has seen, and each beat changes that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gr_core.errors import ConfigError, StoreUnavailable
from gr_core.lake import remote

logger = logging.getLogger(__name__)

LEASE_SECONDS = 120.0
"""A lock that was not renewed for so long has no holder."""
BEAT_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between two looks at a holder that may be dead


class Lease:
    """The lock object of a home.

    Args:
        uri: Its URI.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._etag = ""
        self._night = ""

    @contextlib.contextmanager
    def taken(self, night: str) -> Iterator[str | None]:
        """Try to take the lock; it waits only to see whether the holder still lives, at most LEASE_SECONDS.

        Yields:
            None when taken (renewed in a thread, freed at the end of the block); else the night of its holder.

        Raises:
            ConfigError: Credentials, rights or the bucket.
            StoreUnavailable: The store did not answer.
        """
        self._night = night
        holder = self._take()
        if holder is not None:
            yield holder
            return
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(ended,), name="lease", daemon=True)
        beating.start()
        try:
            yield None
        finally:
            ended.set()
            beating.join()
            self._free()

    def holder(self, *, watch: bool = False) -> str | None:
        """Return the night of the holder, None where there is none; changes nothing.

        Args:
            watch: Wait for a sign of life (a beat) where the holder is of another machine.
        """
        first: str | None = None
        while True:
            seen = remote.look(self.uri)
            told = _told(seen)
            if seen is None or told is None or _is_over(seen, told):
                return None
            if not watch or _is_alive(told) or first not in (None, seen.etag):
                return str(told["night"])
            first = seen.etag
            time.sleep(_LOOK_SECONDS)

    def _take(self) -> str | None:
        first: str | None = None
        while True:
            seen = remote.look(self.uri)
            told = _told(seen)
            if told is not None and told["token"] == self._token and seen is not None:
                self._etag = seen.etag  # ours, though the answer to the put was lost
                return None
            if seen is None or told is None or _is_over(seen, told):
                if told is not None:
                    logger.warning(
                        "taking the lock of %s from night %s, which ended without freeing it", self.uri, told["night"]
                    )
                etag = remote.put_if(self.uri, self._content(), None if seen is None else seen.etag)
                if etag is not None:
                    self._etag = etag
                    return None
                continue  # another start was faster, or it is ours: look again
            if _is_alive(told) or first not in (None, seen.etag):
                return str(told["night"])
            first = seen.etag
            time.sleep(_LOOK_SECONDS)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS):
            try:
                if not self._renew():
                    logger.error("the lock %s was taken over: this night was silent for too long", self.uri)
                    return
            except (StoreUnavailable, ConfigError) as error:
                logger.warning("the lock was not renewed this time: %s", error)

    def _renew(self) -> bool:
        self._beats += 1
        etag = remote.put_if(self.uri, self._content(), self._etag)
        if etag is None:
            seen = remote.look(self.uri)
            told = _told(seen)
            if seen is None or told is None or told["token"] != self._token:
                self._etag = ""
                return False
            etag = seen.etag  # ours: an earlier beat arrived though its answer did not
        self._etag = etag
        return True

    def _free(self) -> None:
        """Say that nobody holds it; where that fails, the lease runs out by itself."""
        if not self._etag:
            return
        try:
            remote.put_if(self.uri, b"{}\n", self._etag)
        except (StoreUnavailable, ConfigError) as error:
            logger.warning("the lock was not freed, it ends by itself in %.0f s: %s", LEASE_SECONDS, error)

    def _content(self) -> bytes:
        told = {
            "night": self._night,
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "started": _started(os.getpid()),
            "beat": self._beats,
        }
        return (json.dumps(told, sort_keys=True) + "\n").encode()


def _told(seen: remote.Seen | None) -> dict[str, Any] | None:
    """Return what a holder wrote; None where the lock is free."""
    if seen is None:
        return None
    try:
        told = json.loads(seen.content)
    except ValueError:
        return None  # no lock of ours: nobody who wrote it renews it
    return told if isinstance(told, dict) and {"night", "token"} <= told.keys() else None


def _is_over(seen: remote.Seen, told: dict[str, Any]) -> bool:
    """Tell whether a holder is dead: silent for too long, or a process of this machine that is no more."""
    if seen.age_seconds > LEASE_SECONDS:
        return True
    return _is_here(told) and _started(int(told["pid"])) != told["started"]


def _is_alive(told: dict[str, Any]) -> bool:
    """Tell whether a holder surely lives: a process of this machine that runs."""
    return _is_here(told) and _started(int(told["pid"])) == told["started"]


def _is_here(told: dict[str, Any]) -> bool:
    return _machine() is not None and told.get("machine") == _machine()


def _machine() -> str | None:
    """Return what processes that see each other have in common: this boot of the kernel, and the process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None  # not Linux: the lease alone decides


def _started(pid: int) -> str | None:
    """Return when a process was started (clock ticks since boot); None where it is no more, or was killed already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
