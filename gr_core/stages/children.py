"""The training processes that this one has started: a night that is stopped ends them before its lock is freed.

A process group's signal reaches them by itself, a signal to this process alone does not (a container's first process,
`kill PID`, a runner without groups); and the thread that waits for a training cannot be interrupted (case A9).
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator

_Child = subprocess.Popen[str]

_lock = threading.Lock()
_running: dict[_Child, Callable[[_Child], None]] = {}
_refusing = 0


@contextlib.contextmanager
def known(child: _Child, end: Callable[[_Child], None]) -> Iterator[None]:
    """Have a child ended, should the night be stopped within the block; at once where it is being stopped already.

    Args:
        child: The process.
        end: Ends it, and what it started; called from another thread.
    """
    with _lock:
        _running[child] = end
        stopping = _refusing > 0
    if stopping:
        end(child)
    try:
        yield
    finally:
        with _lock:
            _running.pop(child, None)


@contextlib.contextmanager
def ended() -> Iterator[int]:
    """End all children that run, and those that are started within the block.

    Yields:
        How many ran.
    """
    global _refusing  # noqa: PLW0603 -- one a process, as the children are
    with _lock:
        _refusing += 1
        running = list(_running.items())
    try:
        for child, end in running:
            end(child)
        yield len(running)
    finally:
        with _lock:
            _refusing -= 1
