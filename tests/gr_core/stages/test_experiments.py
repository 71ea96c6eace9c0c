"""Experiments: another config on a night's pins and packs, beside the night, without any effect on it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core import experiments
from gr_core.config import load_config
from gr_core.errors import ConfigError, UsageError
from gr_core.lake.journal import Journal, challenger, champion, nights, versions
from gr_core.night import Night, open_night
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import comparing, judging, moving, outcome, paging, tidying, training
from tests.plain import run, run_experiment

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
NEXT, THIRD = DAY + timedelta(days=1), DAY + timedelta(days=2)
FASTER = "train.dense_learning_rate=0.02"


@dataclass(frozen=True, kw_only=True)
class World:
    """Two finished nights, and an experiment beside the second."""

    config: Path
    home: Path
    done: dict[str, Any]
    night: Night
    tried: dict[str, Any]
    files: tuple[str, str]
    """Digest of the second night's folder before and after the experiment."""
    aliases: tuple[dict[str, int], dict[str, int]]


def files_of(folder: Path) -> str:
    """Return a digest of a folder's files: names, bytes and times."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [f"{f} {f.stat().st_mtime_ns} {hashlib.sha256(f.read_bytes()).hexdigest()}" for f in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def registry(home: Path) -> MlflowStore:
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")


def journal(home: Path) -> Journal:
    return Journal(str(home / "lake" / "journal"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("experiments")
    config, home = tiny.make(folder), folder / "home"
    run(config, home, DAY)
    _, done = run(config, home, NEXT)
    own = home / "nights" / str(NEXT)
    before, pointed = files_of(own), registry(home).aliases()
    night, tried = run_experiment(config, home, NEXT, "faster", FASTER)
    files, aliases = (before, files_of(own)), (pointed, registry(home).aliases())
    return World(config=config, home=home, done=done, night=night, tried=tried, files=files, aliases=aliases)


def test_it_trains_on_the_nights_own_packs_from_its_parent(world: World) -> None:
    """Parent, bound and packs are the night's, no pack is written twice, and the weights are others."""
    assert world.night.parent is not None
    assert world.night.parent.version == 1
    assert world.tried["ingest"]["bound"] == world.done["ingest"]["bound"]
    for role, pack in world.tried["pack"].items():
        assert pack["uri"] == world.done["pack"][role]["uri"]
        assert pack["reused"]
    assert world.tried["train"]["uri"] != world.done["train"]["uri"]
    assert world.tried["train"]["digest"] != world.done["train"]["digest"]
    assert not (world.home / "nights" / world.night.key / "packs").exists()


def test_it_leaves_the_night_the_champion_and_the_aliases_as_they_were(world: World) -> None:
    """Not a file of the night has changed, no alias has moved, and its version challenges nobody."""
    entries = journal(world.home).entries()
    assert world.files[0] == world.files[1]
    assert world.aliases[0] == world.aliases[1]
    assert world.tried["register"]["version"] == 3
    assert challenger(entries) == 2
    assert champion(entries).version == world.aliases[0]["champion"]  # type: ignore[union-attr]
    assert nights(entries)[str(NEXT)].state == "completed"
    assert open_night(load_config(world.config), str(world.home), NEXT, at_us=9).finished


def test_it_is_set_beside_the_nights_challenger_on_the_same_rows(world: World) -> None:
    """The pairs name both models' metrics on the night's holdout, with an interval; the reasons say what was changed."""
    judged = world.tried["gate"]
    pair = judged["figures"]["pairs"]["holdout/ne/click"]
    assert judged["gate"] == "none"
    assert judged["figures"]["version"] == 2
    assert pair["a"] == pytest.approx(world.done["gate"]["holdout"]["click"]["ne"])
    assert pair["b"] == pytest.approx(judged["holdout"]["click"]["ne"])
    assert pair["low"] <= pair["delta"] <= pair["high"]
    assert judged["reasons"][0] == "train.dense_learning_rate 0.01 -> 0.02"
    assert judged["reasons"][1].startswith("against the challenger, version 2, same rows: NE click")


def test_status_and_page_show_it_beside_its_night(world: World) -> None:
    """Named, with gate none; the main line's findings do not speak of it; its page has the night's data counts."""
    told = outcome.status(load_config(world.config), str(world.home), THIRD, now_us=1)
    shown = [(one["date"], one.get("experiment"), one["gate"], one["version"]) for one in told["nights"]]
    assert shown[2] == (str(NEXT), "faster", "none", 3)
    assert [one[1] for one in shown[:2]] == [None, None]
    assert told["nights"][2]["rows"] == told["nights"][1]["rows"]
    assert not [found for found in told["findings"] if "faster" in found["where"]]
    page = Path(paging.write(str(world.home), world.night.key)["page"]).read_text()
    assert "No result was left by" not in page


def test_its_run_stands_beside_the_nights_in_mlflow(world: World) -> None:
    """One experiment in MLflow holds both runs, with the same keys; tags tell the experiment from the night."""
    client = registry(world.home)._client
    found = {one.info.run_name: one for one in client.search_runs([registry(world.home).experiment])}
    night, tried = found[str(NEXT)], found[f"{NEXT}-faster"]
    assert night.data.metrics.keys() == tried.data.metrics.keys()
    assert tried.info.status == "FINISHED"
    assert tried.data.tags["daybreak.experiment"] == "faster"
    assert tried.data.tags["daybreak.beside"] == str(NEXT)
    assert tried.data.params["train.dense_learning_rate"] == "0.02"
    version = registry(world.home).version(3)
    assert (version.tags["experiment"], version.tags["parent"]) == ("faster", "1")


def test_its_version_is_never_a_parent_or_champion_but_can_be_compared(world: World) -> None:
    """Promote, rollback and --parent refuse it by name and change nothing; compare takes it."""
    settings, home = load_config(world.config), str(world.home)
    count = len(journal(world.home).entries())
    with pytest.raises(UsageError, match="of experiment faster"):
        moving.promote(settings, home, 3, reason="r", at_us=9)
    with pytest.raises(UsageError, match="of experiment faster"):
        open_night(settings, home, THIRD, at_us=9, parent_version=3)
    assert len(journal(world.home).entries()) == count
    assert versions(journal(world.home).entries())[3].experiment == "faster"
    found = comparing.compare(settings, home, 2, 3)
    assert found["config"] == {"train.dense_learning_rate": [0.01, 0.02]}
    assert found["metrics"]["holdout/ne/click"]["delta"] == pytest.approx(
        world.tried["gate"]["figures"]["pairs"]["holdout/ne/click"]["delta"]
    )


def test_a_finished_one_keeps_its_settings(world: World) -> None:
    """Asked again it is the same; its name is refused for other settings, which it was not run with."""
    settings, home = load_config(world.config, [FASTER]), str(world.home)
    experiments.refuse_other_settings(settings, home, world.night.key)
    other = load_config(world.config, ["train.dense_learning_rate=0.03"])
    with pytest.raises(UsageError, match=r"dense_learning_rate 0\.02 -> 0\.03"):
        experiments.refuse_other_settings(other, home, world.night.key)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("source.daily_cap=7", "source.daily_cap"),
        ("lake.num_buckets=4", "lake.num_buckets"),
        ("model.width=32", "model.width"),
    ],
)
def test_what_it_cannot_change_is_refused_before_anything_is_written(world: World, override: str, where: str) -> None:
    """Its data are the night's, and its parent must fit."""
    count = len(journal(world.home).entries())
    settings = load_config(world.config, [override])
    with pytest.raises(ConfigError, match=where):
        experiments.open_experiment(settings, str(world.home), NEXT, "bad", plain=settings, at_us=9)
    with pytest.raises(UsageError, match="letters, digits"):
        experiments.check_name("../bad")
    assert len(journal(world.home).entries()) == count


@pytest.fixture
def copied(world: World, tmp_path: Path) -> Path:
    """Return a copy of the home; checkpoints and packs are read where they were."""
    shutil.copytree(world.home, tmp_path / "home")
    return tmp_path / "home"


def test_other_packs_are_its_own_and_the_rows_still_the_same(world: World, copied: Path) -> None:
    """With another order of users it writes its own packs, from the night's sequences, and is compared by event."""
    _, tried = run_experiment(world.config, copied, NEXT, "shuffled", "pack.seed=7")

    assert all(part["reused"] for part in tried["sequences"])
    assert all(not pack["reused"] for pack in tried["pack"].values())
    assert str(copied / "nights" / f"{NEXT}+experiment-shuffled") in tried["pack"]["train"]["uri"]
    pair = tried["gate"]["figures"]["pairs"]["holdout/ne/click"]
    assert pair["a"] == pytest.approx(world.done["gate"]["holdout"]["click"]["ne"], abs=1e-6)
    assert pair["b"] != pair["a"]


def test_a_killed_one_is_taken_up_and_another_config_is_another_attempt(
    world: World, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done stays done; its data version is kept as long as it is unfinished; no later night starts from it."""
    run_experiment(world.config, copied, NEXT, "killed", FASTER, stop_after="register")
    key = f"{NEXT}+experiment-killed"
    kept = tidying.kept_versions(journal(copied).entries(), 0)
    assert world.done["ingest"]["bound"]["delta_version"] in kept
    trained: list[Any] = []
    real = training.run_training
    monkeypatch.setattr(training, "run_training", lambda *a, **k: trained.append(a) or real(*a, **k))

    _, again = run_experiment(world.config, copied, NEXT, "killed", FASTER, stop_after="train")
    _, other = run_experiment(world.config, copied, NEXT, "killed", "train.dense_learning_rate=0.03")

    assert again["train"]["reused"]
    assert len(trained) == 1
    attempts = nights(journal(copied).entries())[key].attempts
    assert [list(one["difference"]) for one in attempts] == [["train.dense_learning_rate"]] * 3
    assert other["train"]["digest"] != again["train"]["digest"]
    assert other["finish"]["attempts"] == 3
    night, _ = run(world.config, copied, THIRD, stop_after="ingest")
    assert night.parent is not None
    assert night.parent.version in (1, 2)


def test_before_its_night_it_runs_the_shared_stages_and_the_night_is_as_undisturbed(
    world: World, tmp_path: Path
) -> None:
    """The night counts as not run until its own start, which trains on the very packs, to the undisturbed weights."""
    home = tmp_path / "home"
    run(world.config, home, DAY)
    settings = load_config(world.config)

    own, tried = run_experiment(world.config, home, NEXT, "early", FASTER)

    told = outcome.status(settings, str(home), THIRD, now_us=1)
    assert [(one["date"], one.get("experiment")) for one in told["nights"]] == [(str(DAY), None), (str(NEXT), "early")]
    assert told["findings"] == []
    assert outcome.next_day(settings, str(home)) == NEXT
    assert outcome.missed_days(str(home), THIRD, 9) == ([NEXT], [])
    assert tried["gate"]["reasons"][1].startswith("against the parent, version 1, same rows")
    assert own.parent is not None
    night, done = run(world.config, home, NEXT)
    assert night.parent == own.parent
    assert night.attempt == 1
    assert all(pack["reused"] for pack in done["pack"].values())
    assert done["pack"]["train"]["uri"] == tried["pack"]["train"]["uri"]
    assert done["train"]["digest"] == world.done["train"]["digest"]
    assert done["finish"]["attempts"] == 1
    assert registry(home).aliases()["challenger"] == done["register"]["version"]
    assert judging.registered(journal(home).entries(), 2)["date"] == str(NEXT)
