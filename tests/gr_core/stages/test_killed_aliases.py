"""Aliases are a projection of the journal: a kill between two of them, or a registry that tells nothing, loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.lake.journal import champion, previous
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import aliases, moving
from tests.erased import FIRST, SECOND, THIRD, entries_of, forget
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
HOLD = ("gate.min_positives=1000000", "gate.insufficient_data=hold")
# Dies by SIGKILL after the first of the alias calls, in the order champion, previous, or the other way round.
DRIVER = """
import os, signal, sys
from gr_core.config import load_config
from gr_core.registry import mlflow_store
from gr_core.stages import moving

config, home, order = sys.argv[1:]
repair, set_alias = mlflow_store.repair_aliases, mlflow_store.MlflowStore.set_alias

def turned(store, wanted):
    return repair(store, dict(reversed(wanted.items())) if order == "backward" else wanted)

def last(self, alias, version):
    set_alias(self, alias, version)
    os.kill(os.getpid(), signal.SIGKILL)

mlflow_store.repair_aliases, mlflow_store.MlflowStore.set_alias = turned, last
moving.rollback(load_config(config), home, reason="clicks fell", at_us=7)
"""


def registry(home: Path) -> MlflowStore:
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return config and home of two promoted nights, each with a version in MLflow; tests copy the home."""
    folder = tmp_path_factory.mktemp("aliases")
    config, home = tiny.make(folder), folder / "home"
    for day in (FIRST, SECOND):
        run(config, home, day)
    assert registry(home).aliases() == {"champion": 2, "previous": 1, "challenger": 2}
    return config, home


@pytest.fixture
def home(two_nights: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(two_nights[1], tmp_path / "home")
    return tmp_path / "home"


def kill_between(config: Path, home: Path, order: str) -> None:
    """Roll back in a process of its own that is killed between two alias calls."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(config), str(home), order],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("order", "half"),
    [("forward", {"champion": 1, "previous": 1, "challenger": 2}), ("backward", {"champion": 2, "challenger": 2})],
)
def test_a_kill_between_two_aliases_loses_nothing(
    two_nights: tuple[Path, Path], home: Path, order: str, half: dict[str, int]
) -> None:
    """The journal's word stands whichever alias was first; the next start of a finished night sets them all."""
    config = two_nights[0]
    kill_between(config, home, order)

    assert registry(home).aliases() == half
    entries = entries_of(home)
    assert (entries[-1].kind, champion(entries).version, previous(entries)) == ("rollback", 1, None)  # type: ignore[union-attr]
    assert not aliases.is_settled(entries)
    aliases.settle(load_config(config), str(home))
    assert registry(home).aliases() == {"champion": 1, "challenger": 2}
    assert entries_of(home) == entries


def spoil(home: Path) -> None:
    """Point the aliases elsewhere, and leave a move in the journal that may not have reached them."""
    moving.rollback(load_config(home.parent / "tiny.toml"), str(home), reason="r", at_us=7)
    for alias, version in (("champion", 2), ("previous", None), ("challenger", 1)):
        registry(home).set_alias(alias, version)


@pytest.mark.parametrize("command", ["promote", "forget", "night"])
def test_every_command_that_changes_state_sets_them_again(
    two_nights: tuple[Path, Path], home: Path, command: str
) -> None:
    """Whatever runs next repairs what an earlier kill left: a move, an erasure, a night of another day."""
    config = two_nights[0]
    shutil.copy(config, home.parent / "tiny.toml")
    spoil(home)
    wanted = {"champion": 1, "challenger": 2}
    match command:
        case "promote":
            moving.promote(load_config(config), str(home), 2, reason="r", at_us=8)
            wanted = {"champion": 2, "previous": 1, "challenger": 2}
        case "forget":
            forget(config, home, "nobody")
        case _:
            aliases.repair_if_moved(load_config(config), str(home))  # what a night's start does under its lock
    assert registry(home).aliases() == wanted


def test_a_registry_that_tells_of_no_champion_makes_nobody_the_first_model(
    two_nights: tuple[Path, Path], home: Path
) -> None:
    """Case B1: no alias is readable, and a challenger that fails the gate is held against champion 2 all the same."""
    from mlflow.tracking import MlflowClient

    for alias in ("champion", "previous", "challenger"):
        registry(home).set_alias(alias, None)
    uri = f"sqlite:///{home}/mlflow.db"
    told = MlflowClient(tracking_uri=uri, registry_uri=uri).search_model_versions("name = 'daybreak-tiny'")
    assert [list(one.aliases) for one in told] == [[], []]

    night, done = run(two_nights[0], home, THIRD, *HOLD)

    assert night.parent is not None
    assert night.parent.version == 2
    assert (done["gate"]["gate"], done["gate"]["champion"]) == ("held", 2)
    assert not any("first model" in reason for reason in done["gate"]["reasons"])
    assert _version(champion(entries_of(home))) == 2
    assert registry(home).aliases() == {"champion": 2, "previous": 1, "challenger": 3}


def _version(chosen: Any) -> int | None:
    return chosen.version if chosen else None
