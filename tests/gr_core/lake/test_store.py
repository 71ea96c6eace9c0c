"""The store: whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gr_core.errors import UsageError
from gr_core.lake import store

HOMES = ["a b", "é漢", "x#y", "x?y", "a%20b", "50%", "a[b]c*"]


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


@pytest.mark.parametrize("name", HOMES)
def test_file_uris_are_percent_decoded_and_paths_are_not(tmp_path: Path, name: str) -> None:
    """A file:// URI and the path that it encodes are one file; a path's own % stays as it is."""
    path = tmp_path / name / "a.json"
    store.write_json(str(path), 1)
    store.write_json(path.as_uri(), 2)

    assert path.read_text() == "2\n"
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert store.local_path(path.as_uri()) == path
    assert store.exists(path.as_uri())


@pytest.mark.parametrize("name", ["a%20b", "x#y", "x?y", "k=v", "a[b]", "a|b", "a^b", "a\\b", "a\nb"])
def test_a_home_that_no_delta_table_can_have_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """What deltalake would panic on, or keep elsewhere, is one error that names the path."""
    with pytest.raises(UsageError, match="home's path may not contain") as caught:
        store.delta_uri(str(tmp_path / name / "events"))

    assert name in caught.value.message
    assert store.delta_uri("s3://bucket/a=b") == "s3://bucket/a=b"


def test_a_place_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    """Where a part of the path is a file, both ways of writing name the place and the remedy."""
    (tmp_path / "home").write_text("a file")
    uri = str(tmp_path / "home" / "packs" / "train")

    with pytest.raises(UsageError, match=r"home/packs/train cannot be written.*--home"):
        store.write_bytes(uri, b"")
    with pytest.raises(UsageError, match=r"home/packs/train cannot be written.*--home"), store.directory(uri):
        pass


def test_a_read_only_place_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or file system that may only be read says so; errors of the block itself pass as they are."""
    uri = str(tmp_path / "a")
    with pytest.raises(PermissionError, match="not the store's"), store.directory(uri):
        raise PermissionError(errno.EACCES, "not the store's")

    def refuse(**_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(UsageError, match="Read-only file system"):
        store.write_bytes(uri, b"")
    with pytest.raises(UsageError, match="Read-only file system"), store.directory(uri):
        pass
