"""`python -m flows.ephemeral APP PORT`: Prefect's server for one command; ends when its stdin closes.

Its starter holds the other end of the pipe and never writes: it closes with that process, also after kill -9, so no
server is left. A signal to the starter's process group (Ctrl-C, a supervisor's stop) does not reach it, since it runs in
a session of its own: the flow still has it to report to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import uvicorn

_GRACE_SECONDS = 5.0


def main() -> None:
    """Serve until told to end."""
    app, port = sys.argv[1:]
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    uvicorn.run(app, factory=True, host="127.0.0.1", port=int(port), log_level="error", lifespan="on")


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
