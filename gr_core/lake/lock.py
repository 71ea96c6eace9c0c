"""One writer a home: a lock that the operating system frees when its holder dies (cases A3, A5, A8).

It guards against two starts on one machine. What two machines write is decided by the journal's and the event
table's compare-and-set; the lock only saves the second one its work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gr_core.lake import store

_ATTEMPTS = 10
_PAUSE_SECONDS = 0.02  # a look at the lock, and the moment between taking it and writing one's name, are far shorter


def _lock_path(home: str) -> Path:
    if store.is_local(home):
        return store.local_path(home) / "night.lock"
    return Path(tempfile.gettempdir()) / f"daybreak-{hashlib.sha256(home.encode()).hexdigest()[:16]}.lock"


@contextlib.contextmanager
def night_lock(home: str, night: str) -> Iterator[str | None]:
    """Try to take the home's lock for a night, without waiting for another night to end.

    Yields:
        None when taken (it is freed at the end of the block or of the process); else the night of its holder.

    Raises:
        UsageError: Nothing can be written in this home.
    """
    path = _lock_path(home)
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


def running_night(home: str) -> str | None:
    """Return the night that a live process works on in this home, if any; takes and changes nothing."""
    path = _lock_path(home)
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
