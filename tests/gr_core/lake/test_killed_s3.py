"""What a killed process leaves on this machine of folders on S3: removed, so that no copy outlives its folder."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from gr_core.lake import folders, remote, store
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]


def test_a_removal_that_was_killed_leaves_no_copy_here(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go first, so that what the next run finds nothing of any more has no copy either."""
    with store.directory(f"{bucket}/nights/1/packs") as folder:
        (folder / "a").write_text("x")
    copy = store.local_copy(f"{bucket}/nights/1/packs")
    with monkeypatch.context() as patch:
        patch.setattr(remote, "remove_objects", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.remove_tree(f"{bucket}/nights/1/packs")

    assert not copy.exists()
    store.remove_tree(f"{bucket}/nights/1/packs")
    assert store.listing(bucket) == []


def test_what_a_killed_process_had_not_uploaded_is_removed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workplaces of dead processes go, those of living ones stay."""
    mine = folders.workplace(f"{bucket}/packs")
    monkeypatch.setattr("os.getpid", lambda: 2**30)  # above all that Linux gives
    dead = folders.workplace(f"{bucket}/packs")

    store.remove_leftovers(bucket)

    assert mine.exists()
    assert not dead.parent.exists()
