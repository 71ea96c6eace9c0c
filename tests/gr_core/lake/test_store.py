"""The store: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr_core.errors import UsageError
from gr_core.lake import store


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """An exception inside the block leaves the old state and no litter (case C1)."""
    uri = str(tmp_path / "packs" / "train")
    with store.directory(uri) as path:
        (path / "index.json").write_text("old")

    with pytest.raises(RuntimeError, match="half way"):
        _write_half(uri)

    assert (tmp_path / "packs" / "train" / "index.json").read_text() == "old"
    assert [p.name for p in (tmp_path / "packs").iterdir()] == ["train"]


def test_a_directory_replaces_the_earlier_one(tmp_path: Path) -> None:
    """A second write leaves nothing of the first."""
    uri = str(tmp_path / "x")
    for name in ("a", "b"):
        with store.directory(uri) as path:
            (path / name).write_text(name)

    assert [p.name for p in (tmp_path / "x").iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_json_round_trip_and_uris(tmp_path: Path) -> None:
    """JSON written is JSON read; file:// and plain paths are the same; s3:// is not local."""
    uri = store.join(f"file://{tmp_path}", "a", "b.json")

    store.write_json(uri, {"x": [1, None]})

    assert store.read_json(str(tmp_path / "a" / "b.json")) == {"x": [1, None]}
    assert store.exists(uri)
    assert not store.is_local("s3://bucket/key")
    with pytest.raises(UsageError, match="not a local path"):
        store.local_path("s3://bucket/key")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk fails before the rename, the old bytes stay and no temporary file remains."""
    uri = str(tmp_path / "a.json")
    store.write_json(uri, 1)

    def fail(_handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write_json(uri, 2)

    assert store.read_json(uri) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def _write_half(uri: str) -> None:
    with store.directory(uri) as path:
        (path / "index.json").write_text("new")
        raise RuntimeError("half way")
