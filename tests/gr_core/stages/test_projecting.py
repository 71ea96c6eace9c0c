"""A night's MLflow run from the start of training to whatever ends it (cases B2, B12)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.lake.journal import champion
from gr_core.night import Night, open_night
from gr_core.stages import projecting
from tests.erased import entries_of
from tests.gr_core.stages.test_registry_runs import runs_of

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
NEXT = DAY + timedelta(days=1)


def opened(config: Path, home: Path, at_us: int, *, next_day: bool = False) -> Night:
    return open_night(load_config(config), str(home), NEXT if next_day else DAY, at_us=at_us)


def states(home: Path) -> dict[str, str]:
    return {name: run.info.status for name, run in runs_of(home).items()}


def test_a_run_ends_as_its_night_does_and_begins_again_with_it(tmp_path: Path) -> None:
    """Stopped: KILLED; failed: FAILED; killed without a word: KILLED by the next night. Never FINISHED, one run a night."""
    config, home = tiny.make(tmp_path, days=0), tmp_path / "home"
    night = opened(config, home, 1)
    projecting.begin(night)
    assert states(home) == {str(DAY): "RUNNING", "train": "RUNNING"}
    projecting.conclude(night, "KILLED")  # SIGTERM, SIGINT, a cancel
    assert states(home) == {str(DAY): "KILLED", "train": "KILLED"}
    first = runs_of(home)[str(DAY)].info

    night = opened(config, home, 2)
    projecting.begin(night)
    again = runs_of(home)[str(DAY)].info
    assert (again.run_id, again.status) == (first.run_id, "RUNNING")
    projecting.conclude(night, "FAILED")
    ended = runs_of(home)[str(DAY)].info
    assert (ended.run_id, ended.status) == (first.run_id, "FAILED")
    assert ended.end_time > first.end_time

    projecting.begin(opened(config, home, 3))  # SIGKILL: nothing ends it but the next start
    other = opened(config, home, 4, next_day=True)
    projecting.begin(other)
    runs = runs_of(home)
    assert (runs[str(DAY)].info.status, runs[str(NEXT)].info.status) == ("KILLED", "RUNNING")
    assert (other.parent, champion(entries_of(home))) == (None, None)

    projecting.end_dead(load_config(config), str(home))  # killed too, and the next start did not get as far as training
    assert states(home) == {str(DAY): "KILLED", str(NEXT): "KILLED", "train": "KILLED"}
