"""Retract on nights of a tiny feed: what goes, what stays, what the next night learns, after kills too."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import load_config
from gr_core.errors import UsageError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.lake.lock import night_lock
from gr_core.stages import erasing, outcome
from tests.erased import (
    FIRST,
    ROWS,
    THIRD,
    Registry,
    entries_of,
    forget,
    interrupt,
    retract,
    snapshot,
    table_of,
)
from tests.plain import run

pytestmark = pytest.mark.usefixtures("no_mlflow")  # opening its database costs seconds


def test_after_a_retraction_the_next_night_learns_as_if_the_day_had_not_been(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, clean_digest: str
) -> None:
    """A poisoned day is promoted and retracted: the next night's weights are those of a world without it."""
    config = poisoned[0]
    told = retract(config, poisoned_home)

    assert told == {"date": "2025-06-02", "reason": "bots", "rows": ROWS, "tainted": [2], "next_parent": 1}
    night, done = run(config, poisoned_home, THIRD, stop_after="train")
    assert night.parent is not None
    assert night.parent.version == 1
    assert done["train"]["digest"] == clean_digest


def test_an_unfinished_night_that_started_from_a_tainted_version_starts_anew(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, clean_digest: str
) -> None:
    """What it had made of the poisoned rows is made again, and its parent is the untainted one from then on."""
    config = poisoned[0]
    night, _ = run(config, poisoned_home, THIRD, stop_after="pack")
    assert night.parent is not None
    assert night.parent.version == 2

    retract(config, poisoned_home)

    night, done = run(config, poisoned_home, THIRD, stop_after="train")
    assert night.parent is not None
    assert night.parent.version == 1
    assert done["train"]["digest"] == clean_digest
    assert run(config, poisoned_home, THIRD, stop_after="ingest")[0].parent == night.parent


def test_a_retraction_is_told_everywhere(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """Quarantine holds the rows, the journal the entry, the nights their reasons, the registry the aliases."""
    config = poisoned[0]
    retract(config, poisoned_home, None, commit=2)

    entry = entries_of(poisoned_home)[-1]
    assert (entry.kind, entry.night) == ("retracted", "2025-06-02")
    assert (entry.payload["rows"], entry.payload["restored"], entry.payload["kept"]) == (ROWS, 30, 0)
    reasons = nights(entries_of(poisoned_home))["2025-06-02"].reasons
    assert reasons[-1] == "commit 2 was retracted: bots; its version 2 is tainted"
    done = outcome.finished(str(poisoned_home), "2025-06-02")
    assert done is not None
    assert done["gate"] == "promoted"
    assert Registry.aliases == {"champion": 1, "previous": None, "challenger": 2}
    rows = pl.concat([pl.read_parquet(path) for path in (poisoned_home / "lake" / "quarantine").rglob("*.parquet")])
    assert rows["reason"].to_list() == ["retracted"] * ROWS
    assert (
        table_of(config, poisoned_home)
        .read(1)
        .equals(table_of(config, poisoned_home).read(table_of(config, poisoned_home).delta_version()))
    )


def test_retracting_the_first_day_leaves_no_parent(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """All versions were trained on it: the next night is a first one."""
    config = poisoned[0]
    told = retract(config, poisoned_home, FIRST)

    assert (told["tainted"], told["next_parent"]) == ([1, 2], None)
    assert champion(entries_of(poisoned_home)) is None
    assert run(config, poisoned_home, THIRD, stop_after="ingest")[0].parent is None


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"date": date(2024, 1, 1), "commit": None}, "nothing was ingested as the night of 2024-01-01"),
        ({"date": None, "commit": 9}, "nothing was ingested as commit 9"),
        ({"date": None, "commit": None}, "either"),
        ({"date": FIRST, "commit": 1}, "either"),
        ({"date": FIRST, "commit": None, "reason": " "}, "needs a reason"),
    ],
    ids=["date", "commit", "neither", "both", "reason"],
)
def test_a_wrong_retraction_changes_nothing(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, asked: dict[str, Any], match: str
) -> None:
    """One clear error, exit status 2, before any state changes."""
    config, before = poisoned[0], snapshot(poisoned_home)

    with pytest.raises(UsageError, match=match):
        erasing.retract(load_config(config), str(poisoned_home), **{"reason": "r", **asked}, at_us=1)
    assert snapshot(poisoned_home) == before


def test_nothing_is_retracted_twice(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """The second time says so and changes nothing."""
    config = poisoned[0]
    retract(config, poisoned_home)
    count = len(entries_of(poisoned_home))

    with pytest.raises(UsageError, match="nothing to retract: commit 2"):
        retract(config, poisoned_home)
    assert len(entries_of(poisoned_home)) == count


def test_neither_runs_beside_a_night(poisoned: tuple[Path, Path, Path], poisoned_home: Path) -> None:
    """While a night holds the poisoned_home, both refuse before anything changes."""
    config = poisoned[0]
    with night_lock(str(poisoned_home), "2025-06-03"):
        before = snapshot(poisoned_home)
        with pytest.raises(UsageError, match="2025-06-03 is running"):
            retract(config, poisoned_home)
        with pytest.raises(UsageError, match="2025-06-03 is running"):
            forget(config, poisoned_home)
        assert snapshot(poisoned_home) == before


def test_a_retraction_killed_before_the_journal_is_finished_by_the_next(
    poisoned: tuple[Path, Path, Path], poisoned_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have left the table: the second run takes up what the first one did, and tells the same."""
    config = poisoned[0]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retract(config, poisoned_home)

    told = retract(config, poisoned_home)
    assert told == {"date": "2025-06-02", "reason": "bots", "rows": ROWS, "tainted": [2], "next_parent": 1}
    assert [e.kind for e in entries_of(poisoned_home)].count("retracted") == 1
    assert table_of(config, poisoned_home).erasures() == 1
