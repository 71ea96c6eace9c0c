"""Ephemeral Prefect servers are ended once their starter is gone, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.servers import end_orphaned_servers

SERVER = "import time; time.sleep(60)  # prefect.server.api.server:create_app"
STARTER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc, which only Linux has")
def test_a_server_is_ended_once_its_starter_was_killed(tmp_path: Path) -> None:
    """While the starter lives nothing happens; after kill -9 the server of this home is ended, that of another is not."""
    home = str(tmp_path / "prefect")
    variables = {**os.environ, "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_HOME": home}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, SERVER], env=variables, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    deadline = time.monotonic() + 20
    while "create_app" not in Path(f"/proc/{server}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)

    assert end_orphaned_servers(home) == []
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()

    assert end_orphaned_servers(str(tmp_path / "other")) == []
    assert end_orphaned_servers(home) == [server]
    while Path(f"/proc/{server}/cmdline").exists() and Path(f"/proc/{server}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the server still runs"
        time.sleep(0.01)
