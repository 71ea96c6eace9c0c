"""The lock of a home: one writer, freed when its holder dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
