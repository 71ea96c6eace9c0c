"""Many tasks at once on the server that a command starts for itself, whose database others lock meanwhile (case A19)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SHARDS, EVALUATIONS = 64, 4
HELD_SECONDS = 0.2

FLOW = """
import sys
from pathlib import Path

from flows.running import prepare

home = Path(sys.argv[1])
prepare(str(home))

import logging
import time

from prefect import flow
from prefect.client.orchestration import get_client

from flows.runners import in_threads
from tasks.evaluate import evaluate
from tasks.sequences import build_bucket


def body(bucket):
    logging.getLogger("gr_core.contention").info("part %s", bucket)
    (home / f"part-{bucket}").write_text(str(bucket))
    return bucket


build_bucket.fn = evaluate.fn = body


@flow
def contended(shards, evaluations):
    scored = [evaluate.submit(f"evaluation-{n}") for n in range(evaluations)]
    return in_threads(build_bucket, list(range(shards))), [one.result() for one in scored]


made = contended(int(sys.argv[2]), int(sys.argv[3]))
deadline = time.monotonic() + 120
with get_client(sync_client=True) as client:  # the server writes the states of tasks after the tasks
    while len(ran := client.read_task_runs()) < sum(map(len, made)) or not all(run.state and run.state.is_completed() for run in ran):
        assert time.monotonic() < deadline, [run.state for run in ran]
        time.sleep(1)
print(made)
"""


def hold_now_and_then(database: Path, done: threading.Event) -> int:
    """Lock a database for writing again and again, until told to end; returns how often it was held."""
    held = 0
    while not done.wait(0.2):
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(database)) as other:
            other.execute("SELECT 1 FROM task_run LIMIT 1")  # once the server has made its tables
            other.execute("BEGIN IMMEDIATE")
            held += 1
            time.sleep(HELD_SECONDS)
            other.rollback()
    return held


@pytest.mark.prefect
def test_a_locked_database_loses_no_task_and_fails_no_run(tmp_path: Path) -> None:
    """64 shards beside 4 evaluations while the database is locked again and again: exit 0, all outputs, all states Completed."""
    variables = {key: value for key, value in os.environ.items() if key != "PREFECT_HOME"}  # its own: below the home
    words = [sys.executable, "-c", FLOW, str(tmp_path), str(SHARDS), str(EVALUATIONS)]
    done, database, held = threading.Event(), tmp_path / "prefect" / "prefect.db", []
    disturbing = threading.Thread(target=lambda: held.append(hold_now_and_then(database, done)))
    disturbing.start()
    try:
        ran = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
    finally:
        done.set()
        disturbing.join()

    assert ran.returncode == 0, ran.stderr
    names = [f"evaluation-{n}" for n in range(EVALUATIONS)]
    assert ran.stdout.strip() == str((list(range(SHARDS)), names))
    assert {path.name for path in tmp_path.glob("part-*")} == {f"part-{one}" for one in (*range(SHARDS), *names)}
    assert held[0] > 0
    with contextlib.closing(sqlite3.connect(database)) as kept:
        states = kept.execute("SELECT state_type, count(*) FROM task_run GROUP BY state_type").fetchall()
        flows = kept.execute("SELECT state_type FROM flow_run").fetchall()
    assert (states, flows) == ([("COMPLETED", SHARDS + EVALUATIONS)], [("COMPLETED",)])
