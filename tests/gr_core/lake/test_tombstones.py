"""Tombstones: who is listed is hidden, for good, and the list names nobody."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from gr_core.errors import FormatError
from gr_core.hashing import bucket_of
from gr_core.lake import tombstones


def lake(path: Path) -> str:
    return str(path / "lake")


def test_a_lake_without_tombstones_hides_nobody(tmp_path: Path) -> None:
    """Asking makes nothing, and no row is hashed."""
    found = tombstones.load(lake(tmp_path))

    assert not found
    assert found.hides(pl.Series(["a", None], dtype=pl.String)).to_list() == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_listed_user_is_hidden_and_nobody_else(tmp_path: Path) -> None:
    """Rows of the user are hidden wherever they stand; unknown users are not."""
    tombstones.add(lake(tmp_path), "u7", 8, at_us=1, versions=[])
    found = tombstones.load(lake(tmp_path))

    users = pl.Series(["u7", "u77", None, "U7", "u7"], dtype=pl.String)
    assert found.hides(users).to_list() == [True, False, False, False, True]
    assert found.buckets == {bucket_of("u7", 8)}
    assert found.hides(pl.Series([], dtype=pl.String)).to_list() == []


def test_the_list_holds_no_id(tmp_path: Path) -> None:
    """Neither a name nor a content of the files has the user's id."""
    tombstones.add(lake(tmp_path), "someone-in-person", 8, at_us=1, versions=[])

    for path in tmp_path.rglob("*"):
        assert "someone" not in path.name
        assert path.is_dir() or b"someone" not in path.read_bytes()


def test_asking_twice_keeps_the_first_and_adds_versions(tmp_path: Path) -> None:
    """A tombstone is never taken back: its time stays, versions trained on the user join."""
    first = tombstones.add(lake(tmp_path), "u7", 8, at_us=1, versions=[2])
    second = tombstones.add(lake(tmp_path), "u7", 8, at_us=9, versions=[1, 2])

    assert first == {"format": 1, "at_us": 1, "versions": [2]}
    assert second == {"format": 1, "at_us": 1, "versions": [1, 2]}
    assert tombstones.add(lake(tmp_path), "u7", 8, at_us=10, versions=[]) == second
    assert len(list((tmp_path / "lake" / "tombstones").iterdir())) == 1


def test_a_damaged_one_is_named_and_hides_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its name is what hides the user; its versions are told to be lost, never passed over."""
    tombstones.add(lake(tmp_path), "u7", 8, at_us=1, versions=[3])
    (path,) = (tmp_path / "lake" / "tombstones").iterdir()
    path.write_text('{"format": 1, "ver')

    assert tombstones.load(lake(tmp_path)).hides(pl.Series(["u7"])).to_list() == [True]
    with pytest.raises(FormatError, match=f"{path.name} is damaged, it is no JSON"):
        tombstones.trained(lake(tmp_path))
    tombstones.add(lake(tmp_path), "u7", 8, at_us=2, versions=[4])
    assert f"{path.name} is damaged" in caplog.text
    assert tombstones.trained(lake(tmp_path)) == [[4]]
