"""Action rows that wait for their impression, from one commit to the next."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from gr_core.data.joining import WAITING
from gr_core.lake import pending
from tests.shop import NOON


def test_rows_come_back_as_they_were_left(tmp_path: Path) -> None:
    """Times, bits and places survive; nothing waiting is no file."""
    rows = pl.DataFrame(
        {"event_id": ["r:1"], "actions": [3], "acted_at": [NOON], "feed": ["actions"], "file": ["f"], "commit": [3]},
        schema=WAITING,
    )
    path = pending.write(str(tmp_path), 4, "2025-06-01", rows)
    assert pending.read(str(tmp_path), path).equals(rows)
    assert pending.write(str(tmp_path), 5, "2025-06-02", rows.head(0)) == ""
    assert pending.read(str(tmp_path), "").schema == WAITING


def test_two_writers_of_one_number_do_not_meet(tmp_path: Path) -> None:
    """The loser of a race leaves the winner's file as it is."""
    row = {"event_id": "r:1", "actions": 1, "acted_at": NOON, "feed": "actions", "file": "f", "commit": 1}
    first = pending.write(str(tmp_path), 1, "2025-06-01", pl.DataFrame([row], schema=WAITING))
    second = pending.write(str(tmp_path), 1, "2025-06-02", pl.DataFrame([row, row], schema=WAITING))
    assert pending.read(str(tmp_path), first).height == 1
    assert pending.read(str(tmp_path), second).height == 2


def test_rows_of_an_ingestion_that_was_taken_back_wait_no_longer(tmp_path: Path) -> None:
    """Those that another one read stay; a second time there is nothing left to drop."""
    row = {"event_id": "r:1", "actions": 1, "acted_at": NOON, "feed": "actions", "file": "f"}
    rows = pl.DataFrame([{**row, "commit": number} for number in (1, 2, 2)], schema=WAITING)
    path = pending.write(str(tmp_path), 2, "2025-06-02", rows)
    assert pending.drop(str(tmp_path), path, [2]) == 2
    assert pending.read(str(tmp_path), path)["commit"].to_list() == [1]
    assert pending.drop(str(tmp_path), path, [2]) == 0
    assert pending.drop(str(tmp_path), "", [2]) == 0
