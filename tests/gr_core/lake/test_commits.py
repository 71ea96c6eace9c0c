"""Concurrent writers and crashes: one night is one commit, and no count is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError

from gr_core.errors import CommitConflict
from gr_core.lake.events import EventTable
from gr_core.refs import Rows
from tests.events import CLICK, batch, event, make_config, masks, table


def test_two_handles_at_one_version_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower writer meets the conflict, works everything out again and takes the next number."""
    config = make_config(daily_cap=3)
    events, other = table(tmp_path, config), table(tmp_path, config)
    events.ingest("n0", batch(config, event("a")), parent=None)
    write, raced = EventTable._write, []

    def race(self: EventTable, *arguments: Any) -> None:
        if not raced:
            raced.append(True)
            other.ingest("fast", batch(config, event("a", actions=CLICK), event("b"), bad=1), parent=None)
        write(self, *arguments)

    monkeypatch.setattr(EventTable, "_write", race)
    made = events.ingest("slow", batch(config, event("b"), event("c"), event("d"), bad=2), parent=None)

    assert [(c.night, c.number) for c in events.commits()] == [("n0", 1), ("fast", 2), ("slow", 3)]
    assert made.rows == Rows(read=5, committed=1, duplicates=1, quarantined=3)
    assert masks(events.read(made.delta_version)) == {"a": (CLICK, 3), "b": (0, 3), "c": (0, 3)}
    assert events.quarantine(2).height == 1
    assert events.quarantine(3).height == 3


def test_two_starts_of_one_night_make_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer that loses finds the night done and returns the winner's commit."""
    config = make_config()
    events, other = table(tmp_path, config), table(tmp_path, config)
    write, raced = EventTable._write, []

    def race(self: EventTable, *arguments: Any) -> None:
        if not raced:
            raced.append(True)
            other.ingest("n1", batch(config, event("a")), parent=None)
        write(self, *arguments)

    monkeypatch.setattr(EventTable, "_write", race)
    made = events.ingest("n1", batch(config, event("a")), parent=None)

    assert [commit.night for commit in events.commits()] == ["n1"]
    assert made.number == 1
    assert events.read(made.delta_version).height == 1


def test_endless_conflicts_end_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bounded number of attempts the night fails by name, and its quarantine is not seen."""
    config = make_config()
    events = table(tmp_path, config)

    def lose(*_: Any) -> None:
        raise CommitFailedError("another writer")

    monkeypatch.setattr(EventTable, "_write", lose)
    with pytest.raises(CommitConflict, match="night n1: other writers won"):
        events.ingest("n1", batch(config, event("a"), bad=1), parent=None)
    assert events.commits() == []
    assert events.quarantine(1).is_empty()


def test_threads_that_ingest_at_once_lose_nothing(tmp_path: Path) -> None:
    """Six writers on a table that does not exist yet: six commits, numbered 1 to 6, every event once."""
    config = make_config()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rows = [event(f"{number}-{place}", f"u{place}") for place in range(5)]
            table(tmp_path, config).ingest(f"n{number}", batch(config, *rows, event("shared")), parent=None)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    commits = table(tmp_path, config).commits()

    assert failures == []
    assert [commit.number for commit in commits] == list(range(1, 7))
    assert sum(commit.rows.committed for commit in commits) == 31
    assert table(tmp_path, config).read(commits[-1].delta_version)["event_id"].is_unique().sum() == 31


def test_a_kill_after_the_commit_loses_no_count(root: Path, tmp_path: Path) -> None:
    """A process that dies right after its commit leaves all that the next one needs."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); import tests.events as t; from pathlib import Path\n"
        "config = t.make_config(); events = t.table(Path(sys.argv[1]), config)\n"
        "events.ingest('n1', t.batch(config, t.event('a'), bad=1), parent=None); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(root)], check=False)
    config = make_config()
    found = table(tmp_path, config).find("n1")

    assert done.returncode == 9
    assert found is not None
    assert found.rows == Rows(read=2, committed=1, quarantined=1)
    assert table(tmp_path, config).ingest("n1", batch(config, event("a"), bad=1), parent=None) == found
