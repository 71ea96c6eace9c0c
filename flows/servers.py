"""Prefect's ephemeral servers that a killed process left behind.

Prefect stops its ephemeral server at exit; after kill -9 there is no exit, and the server would hold the home's database
and an inherited stdout for ever. The next start in that home ends it. Linux only (it reads /proc); elsewhere a no-op.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

logger = logging.getLogger("gr_core.flows")

_SERVER = b"prefect.server.api.server:create_app"
_PARENTS = (b"python", b"daybreak", b"prefect", b"pytest")


def end_orphaned_servers(prefect_home: str) -> list[int]:
    """End the ephemeral servers of a Prefect home whose starter is gone.

    Args:
        prefect_home: The home's PREFECT_HOME; servers of other homes are left alone.

    Returns:
        Process ids of the servers that were told to end.
    """
    ended = []
    for process in Path("/proc").glob("[0-9]*"):
        if not _is_orphan(process, prefect_home):
            continue
        pid = int(process.name)
        try:
            os.kill(pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            continue
        logger.info("ended an ephemeral Prefect server that a killed run left behind, process %d", pid)
        ended.append(pid)
    return ended


def _is_orphan(process: Path, prefect_home: str) -> bool:
    try:
        if _SERVER not in (process / "cmdline").read_bytes():
            return False
        variables = (process / "environ").read_bytes().split(b"\0")
        if b"PREFECT__SERVER_EPHEMERAL=1" not in variables or f"PREFECT_HOME={prefect_home}".encode() not in variables:
            return False
        status = (process / "status").read_text()
        parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
        starter = (process.parent / parent / "cmdline").read_bytes()
    except (OSError, StopIteration):
        return False  # it ended meanwhile, or is not ours to look at
    return not any(name in starter for name in _PARENTS)
