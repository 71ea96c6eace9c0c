"""The lock of a home: one writer, freed when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gr_core.errors import UsageError
from gr_core.lake.lock import night_lock, running_night

HOLD = """
import sys, time
from gr_core.lake.lock import night_lock
with night_lock(sys.argv[1], "2025-06-01") as holder:
    print(holder, flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).parent.parent.parent.parent


def test_a_second_start_learns_who_runs_and_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    """While a process holds the lock, others are told its night; after kill -9 it is free at once (cases A3, A8)."""
    home = str(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, home], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "None"

    with night_lock(home, "2025-06-02") as told:
        assert told == "2025-06-01"
    assert running_night(home) == "2025-06-01"

    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert running_night(home) is None
    with night_lock(home, "2025-06-02") as told:
        assert told is None


def test_the_lock_is_free_after_its_block(tmp_path: Path) -> None:
    """Leaving the block frees the lock, also when the block raised."""
    for _ in range(2):
        with night_lock(str(tmp_path), "a") as told:
            assert told is None
    assert running_night(str(tmp_path)) is None


def test_looking_at_the_lock_never_makes_a_start_believe_that_somebody_runs(tmp_path: Path) -> None:
    """While others look, with a killed holder's text in the file, a start still gets the lock and looks find it free."""
    home = str(tmp_path)
    (tmp_path / "night.lock").write_text('{"night": "2025-06-01", "pid": 1, "host": "elsewhere"}')
    with (tmp_path / "night.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert running_night(home) is None
        threading.Timer(0.05, lambda: fcntl.flock(look, fcntl.LOCK_UN)).start()
        with night_lock(home, "2025-06-02") as told:
            assert told is None


def test_the_text_of_a_dead_process_is_not_believed(tmp_path: Path) -> None:
    """Between taking the lock and writing one's name the file still has a killed holder's: that night does not run."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = tmp_path / "night.lock"
    path.write_text(json.dumps({"night": "2025-06-01", "pid": dead.pid, "host": socket.gethostname()}))
    with path.open() as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)

        assert running_night(str(tmp_path)) == "unknown"


def test_a_home_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """A home that is a file, or lies below one, is named; nobody is said to run."""
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        with pytest.raises(UsageError, match=f"{home} cannot be written"), night_lock(str(home), "2025-06-01"):
            pass
        assert running_night(str(home)) is None
