"""What MLflow shows of nights: one database, the right day, and no run of a dead night left running."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import FormatError
from gr_core.lake.journal import Journal, champion, nights
from gr_core.night import open_night
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.revision import git_revision
from gr_core.stages import aliases, training
from gr_core.train.state import verify
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


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[dict[str, Any]]]:
    """Run two nights from two working directories; returns the home, those and HOME, and what the nights did."""
    folder = tmp_path_factory.mktemp("two")
    config = tiny.make(folder, days=2)
    home, places = folder / "home", [folder / name for name in ("one", "two", "user")]
    done = []
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            place.mkdir()
        patch.setenv("HOME", str(places[2]))
        for place, day, changed in zip(places, (DAY, NEXT), ((), ("train.dense_learning_rate=0.02",)), strict=False):
            patch.chdir(place)
            if done:
                shutil.copytree(home, folder / "backup")
            done.append(run(config, home, day, *changed)[1])
    return home, places, done


def test_a_home_that_was_restored_from_a_backup_goes_on(
    two_nights: tuple[Path, list[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Restored as it was before the second night, at another place: that night ends as it did, and the lost home's (E11)."""
    home, _, done = two_nights
    lost = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    shutil.copytree(home.parent / "backup", tmp_path / "home")

    night, again = run(home.parent / "tiny.toml", tmp_path / "home", NEXT, "train.dense_learning_rate=0.02")

    assert night.parent is not None
    assert night.parent.version == done[0]["register"]["version"]
    assert again["train"]["digest"] == done[1]["train"]["digest"]
    assert again["finish"]["version"] == done[1]["finish"]["version"]
    for key in ("gate", "due_events", "new_events", "next_day", "rows"):
        assert again["finish"][key] == done[1]["finish"][key], key
    found = runs_of(tmp_path / "home")
    assert [found[str(day)].info.status for day in (DAY, NEXT)] == ["FINISHED"] * 2
    assert all(str(tmp_path) in found[str(day)].info.artifact_uri for day in (DAY, NEXT))
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == lost


def test_model_files_that_a_backup_lacked_come_back_from_the_checkpoint(
    two_nights: tuple[Path, list[Path], list[dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Restored without its MLflow artifacts: whatever sets the aliases uploads the champion's again (E11)."""
    home, config = tmp_path / "home", load_config(two_nights[0].parent / "tiny.toml")
    shutil.copytree(two_nights[0].parent / "backup", home)
    entries = Journal(str(home / "lake" / "journal")).entries()
    best = champion(entries)
    assert best is not None
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    before = sorted(path.relative_to(home) for path in home.rglob("mlartifacts/models/*/artifacts/**/*"))
    (state,) = home.rglob("mlartifacts/models/*/artifacts/data/checkpoint/state.json")
    state.unlink()

    aliases.repair(config, str(home))
    aliases.repair(config, str(home))

    told = [record.getMessage() for record in caplog.records if "has lost" in record.getMessage()]
    assert told == [
        f"the registry has lost ['data/checkpoint/state.json'] of version {best.version}: uploaded again from the checkpoint"
    ]
    assert sorted(path.relative_to(home) for path in home.rglob("mlartifacts/models/*/artifacts/**/*")) == before
    assert models.version(best.version).digest == json.loads(state.read_text())["digest"]


def test_a_champion_whose_checkpoint_is_gone_is_put_back_from_its_registered_model(
    two_nights: tuple[Path, list[Path], list[dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then no night is opened for it, and where the registry has lost it as well, one line names both (E11)."""
    home, config = tmp_path / "home", load_config(two_nights[0].parent / "tiny.toml")
    shutil.copytree(two_nights[0].parent / "backup", home)
    journal = Journal(str(home / "lake" / "journal"))
    entries, (checkpoint,) = journal.entries(), (home / "nights" / str(DAY)).glob("checkpoint-*")
    shutil.rmtree(checkpoint)

    with pytest.raises(FormatError, match=r"version 1 has no checkpoint any more at .*; put the folder back"):
        open_night(config, str(home), NEXT, at_us=9)
    assert journal.entries() == entries
    (copy,) = home.glob("mlartifacts/models/*/artifacts/data/checkpoint")
    shutil.copytree(copy, checkpoint)
    assert open_night(config, str(home), NEXT, at_us=9).parent is not None
    verify(checkpoint)

    shutil.rmtree(checkpoint)
    shutil.rmtree(home / "mlartifacts" / "models")
    aliases.repair(config, str(home))
    told = caplog.messages[-1]
    assert re.search(
        r"lost files of version 1 is not known, or .* cannot replace them: FileNotFoundError: .*; nights", told
    )


def test_nights_from_two_working_directories_share_one_database(
    two_nights: tuple[Path, list[Path], list[dict[str, Any]]],
) -> None:
    """Both runs stand in the home's SQLite file, tagged with their day; no ./mlruns, nothing in HOME (cases B6, A4)."""
    home, places, _ = two_nights
    found = runs_of(home)
    for day in (DAY, NEXT):
        assert found[str(day)].data.tags["daybreak.date"] == str(day)
        assert found[str(day)].info.status == "FINISHED"
    assert [list(place.iterdir()) for place in places] == [[], [], []]


def test_a_version_says_where_it_came_from(two_nights: tuple[Path, list[Path], list[dict[str, Any]]]) -> None:
    """MLflow alone tells data version, bound, watermark, parent, settings and what they change, revision, signature."""
    from mlflow.models import Model
    from mlflow.tracking import MlflowClient

    home, _, done = two_nights
    uri = f"sqlite:///{home}/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    first, second = (client.get_model_version("daybreak-tiny", str(number)) for number in (1, 2))
    tags = {key.removeprefix("daybreak."): value for key, value in second.tags.items()}
    entries = Journal(str(home / "lake" / "journal")).entries()
    bound = done[1]["ingest"]["bound"]

    assert tags["data.table"] == f"{home}/lake/events"
    assert (tags["data.delta_version"], tags["data.commit"]) == (str(bound["delta_version"]), "2")
    assert json.loads(tags["bound"]) == bound
    assert json.loads(tags["watermark"]) == done[1]["train"]["watermark"]
    assert (tags["date"], tags["mode"], tags["parent"], tags["seed"]) == (str(NEXT), "nightly", "1", "0")
    assert tags["config.fingerprint"] == nights(entries)[str(NEXT)].fingerprint
    assert json.loads(tags["config.difference"]) == {"train.dense_learning_rate": [0.01, 0.02]}
    assert (first.tags["daybreak.parent"], first.tags["daybreak.config.difference"]) == ("None", "no parent")
    assert {key: tags.get(f"git.{key}") for key in git_revision()} == git_revision()
    model = Model.load(str(second.source).removeprefix("file://"))
    assert {"history", "candidates", "shown_at"} <= set(model.get_input_schema().input_names())
    assert model.saved_input_example_info is not None
    assert tags["digest"] == done[1]["train"]["digest"]


def test_the_git_revision_is_that_of_our_checkout_alone(tmp_path: Path) -> None:
    """Revision and a dirty mark in a checkout; nothing outside one, nor where the package only lies inside another's."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def revision(folder: Path) -> dict[str, str]:
        return git_revision.__wrapped__(folder)

    own, inside = tmp_path / "own", tmp_path / "site"
    for package in (own, inside):
        package.mkdir()
        (package / "__init__.py").write_text("")
    assert revision(own) == {}
    git("init", "-q")
    git("add", "own")
    git("commit", "-q", "-m", "c")
    assert revision(own) == {"revision": git("rev-parse", "HEAD"), "dirty": "false"}
    assert revision(inside) == {}
    (own / "__init__.py").write_text("changed = True")
    assert revision(own)["dirty"] == "true"


def test_a_resumed_night_is_one_run_whatever_way_its_numbers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B4: 0.10 for 0.1 resumes run and checkpoint; 0.2 is another attempt, trained anew, and MLflow takes it all."""
    config, home = tiny.make(tmp_path, days=1), tmp_path / "home"
    trained: list[Any] = []
    real = training.run_training
    monkeypatch.setattr(training, "run_training", lambda *a, **k: trained.append(a) or real(*a, **k))

    _, first = run(config, home, DAY, "train.dense_learning_rate=0.1", stop_after="register")
    _, same = run(config, home, DAY, "train.dense_learning_rate=0.10", stop_after="register")
    assert (len(trained), same["train"]["reused"], same["register"]["reused"]) == (1, True, True)
    _, other = run(config, home, DAY, "train.dense_learning_rate=0.2")

    assert len(trained) == 2
    assert other["train"]["digest"] != first["train"]["digest"]
    attempts = nights(Journal(str(home / "lake" / "journal")).entries())[str(DAY)].attempts
    assert attempts[0]["fingerprint"] == attempts[1]["fingerprint"] != attempts[2]["fingerprint"]
    assert [one.get("difference") for one in attempts[1:]] == [{}, {"train.dense_learning_rate": [0.1, 0.2]}]
    found = runs_of(home)
    assert sorted(found) == [str(DAY), "evaluate", "train"]
    assert found[str(DAY)].data.params["train.dense_learning_rate"] == "0.1"
    assert found[str(DAY)].data.tags["daybreak.changed/train.dense_learning_rate"] == "0.2"
    assert found[str(DAY)].info.status == "FINISHED"


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
