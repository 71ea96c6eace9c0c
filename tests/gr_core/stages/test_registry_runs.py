"""What MLflow shows of nights: one database, the right day, and no run of a dead night left running."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.registry.mlflow_store import MlflowStore
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
NEXT = DAY + timedelta(days=1)


def runs_of(home: Path) -> dict[str, Any]:
    """Return the home's MLflow runs by name (night, then train and evaluate below it)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {found.info.run_name: found for found in client.search_runs(experiments)}


def test_nights_from_two_working_directories_share_one_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs stand in the home's SQLite file, tagged with their day; no ./mlruns, nothing in HOME (cases B6, A4)."""
    config = tiny.make(tmp_path, days=2)
    home, places = tmp_path / "home", [tmp_path / name for name in ("one", "two", "user")]
    for place in places:
        place.mkdir()
    monkeypatch.setenv("HOME", str(places[2]))

    for place, day in zip(places, (DAY, NEXT), strict=False):
        monkeypatch.chdir(place)
        run(config, home, day)

    found = runs_of(home)
    for day in (DAY, NEXT):
        assert found[str(day)].data.tags["daybreak.date"] == str(day)
        assert found[str(day)].info.status == "FINISHED"
    assert [list(place.iterdir()) for place in places] == [[], [], []]


def test_a_run_of_a_night_that_died_is_not_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while registering, a night's run is KILLED by the next night, and is neither parent nor champion (B2)."""
    config = tiny.make(tmp_path, days=2)
    home = tmp_path / "home"
    monkeypatch.setattr(MlflowStore, "register", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config, home, DAY)
    assert runs_of(home)[str(DAY)].info.status == "RUNNING"
    monkeypatch.undo()

    night, done = run(config, home, NEXT)

    assert runs_of(home)[str(DAY)].info.status == "KILLED"
    assert runs_of(home)[str(NEXT)].info.status == "FINISHED"
    assert night.parent is None
    assert done["register"]["version"] == 1
