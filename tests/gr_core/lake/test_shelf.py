"""Frames put aside by bucket: the same rows in memory and on disk, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.lake.shelf import Shelf

SCHEMA = pl.Schema({"name": pl.String(), "bucket": pl.Int32()})


def frame(*rows: tuple[str | None, int]) -> pl.DataFrame:
    """Return rows of a name and a bucket."""
    return pl.DataFrame(list(rows), schema=SCHEMA, orient="row")


@pytest.mark.parametrize("limit", [100, 1, 0])
def test_a_bucket_comes_back_in_the_order_it_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """In memory, spilled from the second addition on, and from the first; buckets 3 and 67 share a file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = Shelf(SCHEMA, limit=limit)
    shelf.add(frame(("a", 3), ("b", 67)))
    shelf.add(frame())
    shelf.add(frame((None, 67), ("d", 3), ("e", 0)))

    assert (shelf.spilled, shelf.rows, shelf.buckets) == (limit < 5, 5, {0, 3, 67})
    assert_frame_equal(shelf.take(3), frame(("a", 3), ("d", 3)))
    assert_frame_equal(shelf.take(67), frame(("b", 67), (None, 67)))
    assert_frame_equal(shelf.take(9), frame())
    assert list(tmp_path.iterdir()) == [], "the rows are people's: no file of this folder ever names them"
    assert sorted(shelf.whole()["bucket"].to_list()) == [0, 3, 3, 67, 67]
    del shelf
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_stops_a_write_is_raised_where_the_rows_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that could not be put on disk are never passed over."""

    def full(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    shelf = Shelf(SCHEMA, limit=0)
    monkeypatch.setattr(pl.DataFrame, "write_ipc", full)
    shelf.add(frame(("a", 3)))
    with pytest.raises(OSError, match="the disk is full"):
        shelf.take(3)
    with pytest.raises(OSError, match="the disk is full"):
        shelf.whole()


KILLED = """
import os, signal
from gr_core.lake.shelf import Shelf
from tests.gr_core.lake.test_shelf import SCHEMA, frame

shelf = Shelf(SCHEMA, limit=0)
shelf.add(frame(("person-1", 3), ("person-2", 4)))
assert shelf.take(3)["name"].to_list() == ["person-1"]
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_no_row_on_the_disk(tmp_path: Path, root: Path) -> None:
    """Raw rows of people would lie outside the home, where neither the next night nor a forget looks for them."""
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)}
    ended = subprocess.run([sys.executable, "-c", KILLED], env=variables, cwd=root, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
