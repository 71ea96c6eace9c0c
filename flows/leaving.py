"""The end of a command's process, which no stray thread holds up: whoever started it waits for it (case A5)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

GRACE_SECONDS = 60.0  # Prefect's own server takes a few seconds to end


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Let what is written go nowhere where its reader is gone, as after `| head`: the status tells what was done."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """Exit with this status; after GRACE_SECONDS also where a thread of some library still runs.

    What is left then ends as after kill -9: trainings and Prefect's server with their stdin, the lock with the process.
    """
    threading.Thread(target=_end, args=(status,), daemon=True).start()
    sys.exit(status)


def _end(status: int) -> None:
    time.sleep(GRACE_SECONDS)
    main = threading.main_thread()
    strays = [one.name for one in threading.enumerate() if one is not main and not one.daemon]
    sys.stderr.write(f"daybreak: the command is done; its process ends, though {', '.join(strays) or 'it'} did not\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
