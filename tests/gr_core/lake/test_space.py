"""A full or read-only disk has one error, whichever library met it; other troubles keep their own."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltalake.exceptions import DeltaError

from gr_core.config import load_config
from gr_core.errors import ConfigError, DaybreakError, StoreFull, TrainingError, UsageError
from gr_core.lake import space
from gr_core.lake.journal import Journal
from gr_core.night import STAGE_NOTE, open_night, run_stage
from gr_core.stages import judging
from tests import tiny


def code(number: int) -> OSError:
    """Return what the operating system raises."""
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [
        code(errno.ENOSPC),
        code(errno.EDQUOT),
        code(errno.EFBIG),
        sqlite3.OperationalError("database or disk is full"),
        DeltaError("Generic LocalFileSystem error: Unable to copy data: No space left on device (os error 28)"),
        TrainingError("training stopped: [Errno 28] No space left on device"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:12],
)
def test_a_full_disk_is_named_with_its_place_and_what_to_do(tmp_path: Path, error: Exception) -> None:
    """Also where it is the cause of something else."""
    wrapped = RuntimeError("the task failed")
    wrapped.__cause__ = error

    for one in (error, wrapped):
        found = space.named(str(tmp_path), one)
        assert isinstance(found, StoreFull)
        assert (found.exit_code, found.where) == (1, str(tmp_path))
        assert "free some" in str(found)


@pytest.mark.parametrize(
    "error",
    [code(errno.EROFS), sqlite3.OperationalError("attempt to write a readonly database")],
    ids=["system", "sqlite"],
)
def test_a_read_only_disk_is_named(tmp_path: Path, error: Exception) -> None:
    """Exit 2: only a person can mend it."""
    found = space.named(str(tmp_path), error)

    assert isinstance(found, UsageError)
    assert "its disk is read-only" in str(found)


@pytest.mark.parametrize(
    "error",
    [ConfigError("pack.seed is no known key"), ValueError("wrong"), code(errno.EACCES), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_other_troubles_keep_their_own_error(tmp_path: Path, error: BaseException) -> None:
    """There is space enough here, and nothing in them speaks of a disk."""
    assert space.named(str(tmp_path), error) is None


def test_what_fails_without_a_word_on_a_disk_with_nothing_left_is_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot write its database answers 500 and no more; an error of ours says what it is."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))

    assert isinstance(space.named(str(tmp_path), RuntimeError("500 Internal Server Error")), StoreFull)
    assert space.named(str(tmp_path), ConfigError("pack.seed is no known key")) is None
    assert space.named(str(tmp_path), KeyboardInterrupt()) is None


def test_a_stage_on_a_full_disk_fails_the_night_by_name_and_is_done_again(tmp_path: Path) -> None:
    """The journal has the stage and the error, and no manifest vouches for what was not written."""
    home = tmp_path / "home"
    night = open_night(load_config(tiny.make(tmp_path, days=1)), str(home), tiny.FIRST_DAY, at_us=1)

    def full() -> dict[str, int]:
        raise code(errno.ENOSPC)

    with pytest.raises(StoreFull) as caught:
        run_stage(night, "pack", {}, full)  # type: ignore[arg-type]

    assert isinstance(caught.value, DaybreakError)
    assert caught.value.__notes__ == [f"{STAGE_NOTE}pack"]
    judging.fail(night, caught.value)
    failed = Journal(str(home / "lake" / "journal")).entries()[-1]
    assert (failed.kind, failed.payload["stage"]) == ("failed", "pack")
    assert not run_stage(night, "pack", {}, lambda: {"digest": "x"})["reused"]
