"""Forgetting a user while the history store, which is derived, is broken or a killed run left it half done."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr_core.hashing import bucket_of
from gr_core.lake.history import bucket_folder
from tests.erased import HIM, THIRD, forget, interrupt
from tests.gr_core.lake.test_erasure import holders
from tests.plain import run

pytestmark = pytest.mark.usefixtures("no_mlflow")  # opening its database costs seconds


def test_a_forgetting_killed_before_old_histories_are_removed_is_finished_by_the_next(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests are new, the files that they no longer name still hold his history: the second run removes them."""
    config = poisoned[0]
    with monkeypatch.context() as patch:
        patch.setattr("gr_core.lake.history.HistoryStore._sweep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forget(config, poisoned_home)
    folder = Path(bucket_folder(str(poisoned_home / "lake" / "history"), bucket_of(HIM, 2)))
    old = list(folder.glob("*~0.*"))
    assert old

    forget(config, poisoned_home)

    assert not any(path.exists() for path in old)


@pytest.mark.parametrize("kind", ["index", "data", "json"])
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_broken_history_store_keeps_nobody_from_being_forgotten(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, kind: str, how: str
) -> None:
    """It is derived: the bucket's store is removed, all else happens, and the next night makes it anew."""
    config = poisoned[0]
    for path in (poisoned_home / "lake" / "history").rglob(f"*.{kind}"):
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    told = forget(config, poisoned_home)

    assert holders(poisoned_home, HIM) == []
    assert all(count > 0 for count in told["rows"].values())
    assert forget(config, poisoned_home)["still_held_by"] == told["still_held_by"]
    _, done = run(config, poisoned_home, THIRD, stop_after="sequences")
    assert done["ingest"]["rows"]["forgotten"] > 0
