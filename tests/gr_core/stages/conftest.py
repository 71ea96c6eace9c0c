"""Trainings of stage tests run in the test's process; and fixtures of retract and forget: nights that tests copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.tiny as tiny
from tests.beside import score_here, train_here
from tests.erased import FIRST, REGISTRY, SECOND, THIRD, Registry, conclude, write_day
from tests.plain import run


@pytest.fixture(scope="module", autouse=True)
def trained_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Train and score in this process, which saves the start of a child.

    Modules with TRAINS_IN_A_CHILD or SCORES_IN_A_PROCESS do as a night does.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "TRAINS_IN_A_CHILD", False):
            train_here(patch)
        if not getattr(request.module, "SCORES_IN_A_PROCESS", False):
            score_here(patch)
        yield


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep MLflow out: opening its database costs seconds."""
    monkeypatch.setattr(REGISTRY, Registry)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a config, the home after a good night, and the home after a poisoned second one; tests copy them."""
    folder = tmp_path_factory.mktemp("world")
    config = tiny.make(folder, days=0)
    for day in (FIRST, SECOND, THIRD):
        write_day(folder / "raw", day, poisoned=day == SECOND)
    one, two = folder / "one", folder / "two"
    conclude(config, one, FIRST, 1)
    shutil.copytree(one, two)
    conclude(config, two, SECOND, 2)
    return config, one, two


@pytest.fixture
def poisoned_home(poisoned: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the home after the poisoned night."""
    shutil.copytree(poisoned[2], tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def clean_digest(poisoned: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the third day's weights in a world that never had the second day."""
    config, one, _ = poisoned
    home = tmp_path_factory.mktemp("clean") / "home"
    shutil.copytree(one, home)
    return str(run(config, home, THIRD, stop_after="train")[1]["train"]["digest"])
