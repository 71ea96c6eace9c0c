"""The end of a command's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMAND = """
import sys, threading
from flows import leaving
leaving.GRACE_SECONDS = float(sys.argv[1])
if sys.argv[2] == "stray":
    threading.Thread(target=threading.Event().wait, name="stray").start()
print("{}")
leaving.leave(3)
"""


@pytest.mark.parametrize(("seconds", "thread"), [("0.1", "stray"), ("60", "none")])
def test_a_thread_that_does_not_end_holds_up_no_command(seconds: str, thread: str) -> None:
    """Case A5: its exit status and its one object stand, and the thread is named; without one it ends at once."""
    words = [sys.executable, "-c", COMMAND, seconds, thread]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)

    assert (ended.returncode, ended.stdout) == (3, "{}\n")
    assert ended.stderr == (
        "daybreak: the command is done; its process ends, though stray did not\n" if thread == "stray" else ""
    )


@pytest.mark.parametrize(("words", "status"), [(("config", "show"), 0), (("status",), 0), (("page", "--json"), 2)])
def test_a_reader_that_left_makes_no_failure(tmp_path: Path, words: tuple[str, ...], status: int) -> None:
    """As after `| head`: the status is the command's, and no stack is shown for what nobody reads."""
    readable, writable = os.pipe()
    os.close(readable)
    given = [sys.executable, "-m", "flows.cli", *words, "--config", "conf/world.toml", "--home", str(tmp_path)]
    ended = subprocess.run(given, cwd=ROOT, stdout=writable, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writable)

    assert ended.returncode == status
    assert "Traceback" not in ended.stderr
    assert "Broken" not in ended.stderr
