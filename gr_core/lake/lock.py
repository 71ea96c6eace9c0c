"""One writer a home (cases A3, A5, A8): a lock that the operating system frees when its holder dies.

A local home is guarded by a file lock, a home on S3 by a lock object with a lease (gr_core.lake.lease), so across
machines. What two writers write is decided by the journal's and the event table's compare-and-set all the same; the
lock only saves the second one its work.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.lease import Lease

LOCK = "night.lock"
RETRAIN_LOCK = "retrain.lock"
"""Held by a full retrain for its whole length, beside nights."""
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.02  # a look at the lock, and the moment between taking it and writing one's name, are far shorter


@contextlib.contextmanager
def night_lock(home: str, night: str, *, name: str = LOCK) -> Iterator[str | None]:
    """Try to take the home's lock for a night, without waiting for another night to end.

    On S3 it may wait to see whether a holder on another machine still lives: seconds, at most the lease.

    Args:
        home: URI of the home.
        night: Key of the night.
        name: Which of the home's locks.

    Yields:
        None when taken (it is freed at the end of the block or of the process); else the night of its holder.

    Raises:
        UsageError: Nothing can be written in this home.
        ConfigError: Credentials, rights or the bucket of a home on S3.
        StoreUnavailable: The object store did not answer.
    """
    if not store.is_local(home):
        with Lease(store.join(home, name)).taken(night) as holder:
            yield holder
        return
    path = store.local_path(home) / name
    with contextlib.ExitStack() as stack:
        with store.writable(home):
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(path.open("a+"))
        holder = _blocked(stream, path, fcntl.LOCK_EX)
        if holder is not None:
            yield holder
            return
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps({"night": night, "pid": os.getpid(), "host": socket.gethostname()}))
        stream.flush()
        try:
            yield None
        finally:
            stream.seek(0)
            stream.truncate()


@contextlib.contextmanager
def alone(home: str, what: str) -> Iterator[None]:
    """Hold the home's lock for a command, or refuse.

    Args:
        home: URI of the home.
        what: The command's name.

    Raises:
        UsageError: A night, or another command that changes the home, is running.
    """
    with night_lock(home, what) as holder:
        if holder is not None:
            raise UsageError(
                f"{what} changes what nights read, and {holder} is running in this home; run it again when it is done",
                where="night",
            )
        yield


@contextlib.contextmanager
def unread(home: str, what: str) -> Iterator[None]:
    """Hold all locks of a home for a command that takes rows out of it, or refuse.

    Args:
        home: URI of the home.
        what: The command's name.

    Raises:
        UsageError: A night, a full retrain, or another command that changes the home, is running.
    """
    with alone(home, what), night_lock(home, what, name=RETRAIN_LOCK) as holder:
        if holder is not None:
            raise UsageError(
                f"{what} removes rows that {holder} reads, which is running in this home; stop it (it goes on later, from "
                "its first window) or wait for its end, and run this again",
                where="night",
            )
        yield


def running_night(home: str, *, watch: bool = False, name: str = LOCK) -> str | None:
    """Return the night that a live process works on in this home, if any; takes and changes nothing.

    Args:
        home: URI of the home.
        watch: On S3, wait for a sign of life of a holder on another machine, which may have been killed.
        name: Which of the home's locks.
    """
    if not store.is_local(home):
        return Lease(store.join(home, name)).holder(watch=watch)
    path = store.local_path(home) / name
    if not path.exists():
        return None
    with path.open("r") as stream:
        # shared: a look never keeps a night, or another look, from the lock
        return _blocked(stream, path, fcntl.LOCK_SH)


def _blocked(stream: IO[str], path: Path, kind: int) -> str | None:
    """Take a lock file; where a live process keeps it through all attempts, return the night it wrote."""
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
        else:
            return None
    return _holder(path) or "unknown"


def _holder(path: Path) -> str | None:
    """Return the night in a lock file; None where its writer is dead or has not written yet."""
    try:
        told = json.loads(path.read_text())
        if told.get("host") == socket.gethostname():
            os.kill(int(told["pid"]), 0)
        return str(told["night"])
    except PermissionError:
        return str(told["night"])  # alive, and another user's
    except (ValueError, KeyError, OSError):
        return None
