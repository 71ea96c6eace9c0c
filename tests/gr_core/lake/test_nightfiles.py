"""Outputs of nights that hold a forgotten user: removed whole, with their manifests; all others are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from gr_core.lake import nightfiles


def pack(night: Path, name: str, *users: str, home: str = "/elsewhere") -> Path:
    """Write a pack's index and manifest below a night's folder; the manifest names the home it was made in."""
    folder = night / "packs" / name
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps({"segment_users": users}))
    (folder / "pack.arrow").write_bytes(b"")
    manifest(night, f"pack-{name}", f"{home}/{night.name}/packs/{name}")
    return folder


def sequences(night: Path, bucket: int, *users: str) -> Path:
    """Write a bucket's segments and manifest below a night's folder."""
    folder = night / "sequences" / f"bucket-{bucket:05d}"
    folder.mkdir(parents=True)
    frame = pl.DataFrame({"user_id": list(users)}, schema={"user_id": pl.Categorical()})
    frame.write_ipc(folder / "segments.arrow")
    manifest(night, f"sequences-{bucket:05d}", str(folder))
    return folder


def manifest(night: Path, name: str, uri: str) -> None:
    """Write a stage's manifest."""
    path = night / "manifests" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"fingerprint": "f", "result": {"uri": uri}}))


def test_only_what_holds_the_user_goes(tmp_path: Path) -> None:
    """Outputs of two nights, forced ones too; segments are counted; other roles, buckets and users stay."""
    first, second = tmp_path / "nights" / "2025-06-01", tmp_path / "nights" / "2025-06-02"
    gone = [
        pack(first, "train", "u7", "a", "u7"),
        sequences(first, 3, "u7", "u7", "u7", "a"),
        pack(second / "forced", "train", "u7"),
    ]
    kept = [pack(first, "holdout", "a", "u77"), sequences(first, 4, "u7"), sequences(second, 3, "a")]

    assert nightfiles.forget(str(tmp_path), "u7", 3) == {"sequences": 3, "packs": 3}

    assert not any(path.exists() for path in gone)
    assert all(path.is_dir() for path in kept)
    left = sorted(path.relative_to(tmp_path / "nights").as_posix() for path in tmp_path.rglob("manifests/*"))
    assert left == [
        "2025-06-01/manifests/pack-holdout.json",
        "2025-06-01/manifests/sequences-00004.json",
        "2025-06-02/manifests/sequences-00003.json",
    ]
    assert nightfiles.forget(str(tmp_path), "u7", 3) == {"sequences": 0, "packs": 0}


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """Half-written outputs have no manifest; nobody reads them, and they may hold anybody."""
    night = tmp_path / "nights" / "2025-06-01"
    half = pack(night, ".tmp-train-x1", "a")
    whole = pack(night, "train", "a")

    assert nightfiles.forget(str(tmp_path), "u7", 3) == {"sequences": 0, "packs": 0}
    assert not half.exists()
    assert whole.is_dir()


def test_what_cannot_be_read_goes(tmp_path: Path) -> None:
    """A damaged output may hold him, and a night would make it again anyway."""
    night = tmp_path / "nights" / "2025-06-01"
    damaged = [pack(night, "train", "a"), sequences(night, 3, "a")]
    (damaged[0] / "index.json").write_text('{"segment_us')
    (damaged[1] / "segments.arrow").write_bytes(b"ARROW1 no more")

    nightfiles.forget(str(tmp_path), "u7", 3)
    assert not any(path.exists() for path in damaged)


def test_checkpoints_and_other_files_are_not_looked_at(tmp_path: Path) -> None:
    """What lies in a night's folder itself, and checkpoints, name no user."""
    night = tmp_path / "nights" / "2025-06-01"
    (night / "checkpoint-1").mkdir(parents=True)
    (night / "checkpoint-1" / "index.json").write_text('{"segment_users": ["u7"]}')
    (night / "RUN.json").write_text("{}")

    assert nightfiles.forget(str(tmp_path), "u7", 3) == {"sequences": 0, "packs": 0}
    assert nightfiles.forget(str(tmp_path / "no home"), "u7", 3) == {"sequences": 0, "packs": 0}
    assert (night / "checkpoint-1" / "index.json").exists()
