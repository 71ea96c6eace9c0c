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
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gr_core.lake import store


def _lock_path(home: str) -> Path:
    if store.is_local(home):
        return store.local_path(home) / "night.lock"
    return Path(tempfile.gettempdir()) / f"daybreak-{hashlib.sha256(home.encode()).hexdigest()[:16]}.lock"


@contextlib.contextmanager
def night_lock(home: str, night: str) -> Iterator[str | None]:
    """Try to take the home's lock for a night, without waiting.

    Yields:
        None when taken (it is freed at the end of the block or of the process); else the night of its holder.
    """
    path = _lock_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _holder(path) or "unknown"
            return
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps({"night": night, "pid": os.getpid()}))
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
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(path) or "unknown"
    return None


def _holder(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["night"])
    except (ValueError, KeyError, OSError):
        return None  # between the taking and the writing of the name
