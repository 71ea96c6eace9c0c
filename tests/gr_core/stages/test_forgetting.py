"""Forget on nights of a tiny feed: what goes, what still holds the user, and that a kill loses nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from gr_core.config import load_config
from gr_core.errors import UsageError
from gr_core.hashing import bucket_of
from gr_core.lake.lock import night_lock
from gr_core.night import open_night, run_stage
from gr_core.stages import outcome
from tests.erased import (
    FIRST,
    HIM,
    SECOND,
    THIRD,
    entries_of,
    forget,
    interrupt,
    retract,
    table_of,
    write_day,
)
from tests.gr_core.lake.test_erasure import holders
from tests.plain import run

pytestmark = pytest.mark.usefixtures("no_mlflow")  # opening its database costs seconds


def test_a_forgotten_user_is_in_no_file_of_the_home(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """Not in table, sequences, packs, history, log or journal; what still holds him elsewhere is listed."""
    config = poisoned[0]
    assert holders(poisoned_home, HIM)

    told = forget(config, poisoned_home)

    assert holders(poisoned_home, HIM) == []
    assert told["user"] == HIM
    assert all(count > 0 for count in told["rows"].values())
    assert list(told["rows"]) == ["events", "sequences", "packs"]
    held = [one["what"] for one in told["still_held_by"]]
    assert held[0] == f"raw files below {config.parent / 'raw'}"
    assert [what.partition(":")[0] for what in held if what.startswith("model")] == [
        "model version 1",
        "model version 2",
    ]
    assert entries_of(poisoned_home)[-1].payload == {"rows": told["rows"]}


def test_a_second_forget_finds_nothing_and_lists_the_same(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path
) -> None:
    """Who still holds him is known without his rows."""
    config = poisoned[0]
    first = forget(config, poisoned_home)
    count = len(entries_of(poisoned_home))
    second = forget(config, poisoned_home)

    assert second["rows"] == {"events": 0, "sequences": 0, "packs": 0}
    assert second["still_held_by"] == first["still_held_by"]
    assert len(entries_of(poisoned_home)) == count


STEPS = ("erasure.forget_rows", "leftovers.clean", "nightfiles.forget", "_forget_history", "erasure.forget_files")


@pytest.mark.parametrize("step", [*STEPS, "Journal.append"])
def test_a_forgetting_killed_anywhere_is_finished_by_the_next(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """From the tombstone on no read shows him; the second run removes the rest."""
    config = poisoned[0]
    with monkeypatch.context() as patch:
        patch.setattr(f"gr_core.stages.erasing.{step}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forget(config, poisoned_home)
    table = table_of(config, poisoned_home)
    assert HIM not in table.read(table.delta_version())["user_id"].to_list()

    forget(config, poisoned_home)

    assert holders(poisoned_home, HIM) == []


@pytest.mark.parametrize("later", [False, True], ids=["alone", "a later night came in"])
def test_a_night_that_was_under_way_goes_on_without_him(
    poisoned: tuple[Path, Path, Path],
    poisoned_home: Path,
    later: bool,  # noqa: FBT001
) -> None:
    """Its packs are those of a world where he was forgotten before; a finished night stays finished.

    It reads a version that also holds the rows of a later night then, and sees none of them.
    """
    config = poisoned[0]
    early = poisoned_home.parent / "early"
    shutil.copytree(poisoned_home, early)
    forget(config, early)
    _, wanted = run(config, early, THIRD, stop_after="pack")
    assert wanted["ingest"]["rows"]["forgotten"] > 0

    run(config, poisoned_home, THIRD, stop_after="pack")
    if later:
        write_day(config.parent / "raw", THIRD + timedelta(days=1))
        run(config, poisoned_home, THIRD + timedelta(days=1), stop_after="sequences")
    forget(config, poisoned_home)
    _, done = run(config, poisoned_home, THIRD, stop_after="pack")

    digests = [{role: pack["digest"] for role, pack in one["pack"].items()} for one in (wanted, done)]
    assert digests[0] == digests[1]
    assert holders(poisoned_home, HIM) == []
    assert outcome.finished(str(poisoned_home), "2025-06-02") is not None


def test_a_user_forgotten_first_never_comes_in(poisoned: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Case E11: the tombstone stands before the day is read; his rows are counted forgotten, and are nowhere."""
    config, home = poisoned[0], tmp_path / "home"
    told = forget(config, home)
    assert told["rows"] == {"events": 0, "sequences": 0, "packs": 0}
    assert [one["what"] for one in told["still_held_by"] if one["what"].startswith("model")] == []

    _, done = run(config, home, FIRST, stop_after="pack")

    raw = pl.read_parquet(config.parent / "raw" / "log" / f"date={FIRST}" / "*.parquet")
    rows = done["ingest"]["rows"]
    assert rows["forgotten"] == raw.filter(pl.col("uid") == HIM).height > 0
    assert rows["read"] == rows["committed"] + rows["duplicates"] + rows["quarantined"] + rows["forgotten"]
    assert holders(home, HIM) == []


def test_a_backfill_of_an_old_day_brings_nobody_back(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, tmp_path: Path
) -> None:
    """Case E11: forgotten, then a day of a month ago is backfilled, which has him: counted, and in no file of the home."""
    config, old = poisoned[0], FIRST - timedelta(days=30)
    write_day(tmp_path / "raw", old)
    forget(config, poisoned_home)

    night, done = run(
        config, poisoned_home, old, f"source.root={tmp_path / 'raw'}", stop_after="evaluate", mode="backfill"
    )

    raw = pl.read_parquet(tmp_path / "raw" / "log" / f"date={old}" / "*.parquet")
    rows = done["ingest"]["rows"]
    assert (night.mode, night.parent) == ("backfill", None)
    assert rows["forgotten"] == raw.filter(pl.col("uid") == HIM).height > 0
    assert rows["committed"] > 0
    assert done["train"]["digest"]
    assert holders(poisoned_home, HIM) == []


def test_a_restored_backup_brings_him_back_until_he_is_forgotten_again(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path
) -> None:
    """Case E11: a backup from before the tombstone knows nothing of it, as forget says; forgotten again, he is gone."""
    config = poisoned[0]
    told = forget(config, poisoned_home)
    shutil.rmtree(poisoned_home)
    shutil.copytree(poisoned[2], poisoned_home)  # the backup

    assert holders(poisoned_home, HIM)
    (backups,) = (one for one in told["still_held_by"] if one["what"].startswith("backups of this home"))
    assert backups["until"].endswith("after restoring one, run forget again")
    assert forget(config, poisoned_home)["rows"] == told["rows"]
    assert holders(poisoned_home, HIM) == []


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture every line at every level."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


def test_no_line_names_the_user(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, said: pytest.LogCaptureFixture
) -> None:
    """Neither a log line nor an error of forgetting has the id."""
    config = poisoned[0]
    forget(config, poisoned_home)
    with night_lock(str(poisoned_home), "2025-06-03"), pytest.raises(UsageError) as caught:
        forget(config, poisoned_home)

    assert said.records
    assert HIM not in said.text
    assert HIM not in str(caught.value)


def test_an_empty_id_is_refused(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """It is nobody."""
    with pytest.raises(UsageError, match="got an empty one"):
        forget(poisoned[0], poisoned_home, " ")


@pytest.mark.parametrize("gone", [False, True], ids=["old-files-there", "old-files-gone"])
def test_a_forgotten_user_is_still_held_by_versions_that_retracted_rows_trained(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, *, gone: bool
) -> None:
    """His rows of a retracted day are in no table any more, and yet the weights of its night were made of them."""
    config = poisoned[0]
    retract(config, poisoned_home, FIRST)
    if gone:
        newest = table_of(config, poisoned_home).at()
        assert newest is not None
        newest.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    held = [one["what"] for one in forget(config, poisoned_home)["still_held_by"]]

    assert [what.split(":")[0] for what in held if what.startswith("model")] == ["model version 1", "model version 2"]


def test_a_stage_that_a_forget_took_says_so_when_it_is_forced(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path
) -> None:
    """It is not told that it never ran; of another finished night's missing stage that is still said."""
    config = load_config(poisoned[0])
    forget(poisoned[0], poisoned_home)
    night = open_night(config, str(poisoned_home), SECOND, at_us=1, force="pack")

    with pytest.raises(UsageError, match="`daybreak forget` removed what held a user"):
        run_stage(night, "sequences", {}, dict, part=f"{bucket_of(HIM, config.lake.num_buckets):05d}")


def test_a_stage_that_never_ran_is_told_apart_from_one_that_a_forget_took(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path
) -> None:
    """Without a forget since the night finished there is nothing to repeat."""
    night = open_night(load_config(poisoned[0]), str(poisoned_home), SECOND, at_us=1, force="pack")

    with pytest.raises(UsageError, match="finished without stage register; there is nothing to repeat"):
        run_stage(night, "register", {}, dict)
