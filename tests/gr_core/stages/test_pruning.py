"""Prune on nights of a tiny feed: what goes, what stays and why; killed anywhere, the next run finishes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import Journal, champion, nights
from gr_core.lake.lock import night_lock
from gr_core.night import open_night
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.report.pruned import readable_bytes, render_pruned
from gr_core.stages import comparing, moving, paging, pruning, reevaluating, sequencing, training
from tests.erased import entries_of, forget, interrupt, snapshot
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAYS = [tiny.FIRST_DAY + timedelta(days=n) for n in range(5)]
FEW = ("lake.rerun_days=1", "prune.keep_versions=2")
GONE, ROOT = str(DAYS[1]), str(DAYS[0])
World = tuple[Path, Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Run four nights once, and a fifth up to its packs: it is open; returns config, home, and what each night did."""
    folder = tmp_path_factory.mktemp("world")
    config, home = tiny.make(folder, days=0), folder / "home"
    for day in DAYS:
        tiny.write_day(folder / "raw", day, rows=200)
    done = []
    for version, day in enumerate(DAYS[:4], start=1):
        done.append(run(config, home, day, *FEW)[1])
        best = champion(entries_of(home))
        if best is None or best.version != version:  # the gate held it: so few rows
            moving.promote(load_config(config, list(FEW)), str(home), version, reason="all of them", at_us=2)
    paging.write(str(home), GONE)
    done.append(run(config, home, DAYS[4], *FEW, stop_after="pack")[1])
    left = home / "nights" / ROOT / "packs" / ".tmp-train-left"
    left.mkdir()
    (left / "part").write_text("of a killed process")
    stray = next((home / "lake" / "events").glob("bucket=*")) / "part-of-a-killed-writer.parquet"
    stray.write_bytes(b"PAR1")
    return config, home, done


@pytest.fixture(scope="module")
def pruned(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Prune a copy of the home once; returns it, and what was told."""
    home = tmp_path_factory.mktemp("pruned") / "home"
    shutil.copytree(world[1], home)
    return home, prune(world[0], home)


@pytest.fixture
def home(pruned: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """Return a copy of the pruned home."""
    shutil.copytree(pruned[0], tmp_path / "home")
    return tmp_path / "home"


def prune(config: Path, home: Path, **more: Any) -> dict[str, Any]:
    """Prune; what left the event table goes at once."""
    asked = {"at_us": 5, "retention_hours": 0, **more}
    return pruning.prune(load_config(config, list(FEW)), str(home), **asked)


def registry(home: Path) -> MlflowStore:
    """Open a home's registry."""
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")


def files(home: Path) -> set[str]:
    """Return the names of the files of nights and models."""
    found = (path for name in ("nights", "mlartifacts") for path in (home / name).rglob("*") if path.is_file())
    return {str(path.relative_to(home)) for path in found}


def test_a_dry_run_tells_what_would_go_and_why_the_rest_stays(
    world: World, pruned: tuple[Path, dict[str, Any]]
) -> None:
    """The object of example 7, the same as the run's own; nothing changes, and a running night may go on."""
    before = snapshot(world[1])
    with night_lock(str(world[1]), "another"):
        told = prune(world[0], world[1], dry_run=True)

    assert snapshot(world[1]) == before
    assert told == {**pruned[1], "dry_run": True}
    gone = {one["what"]: one["bytes"] for one in told["removed"]}
    stays = {one["what"]: one["why"] for one in told["kept"]}
    assert gone[f"version 2 of {GONE}: registered model files"] > 100_000
    assert any(what.startswith(f"night {GONE}: RUN.json, checkpoint, ") for what in gone)
    assert gone["event table: 1 files of old versions"] == 4
    assert all(size > 0 for size in gone.values())
    assert f"version 2 of {GONE}" not in stays
    assert stays[f"version 1 of {ROOT}"] == "root of a lineage"
    assert stays[f"version 3 of {DAYS[2]}"].startswith("previous: rollback goes to it; one of the last 2; parent of")
    assert stays[f"version 4 of {DAYS[3]}"].startswith("champion; one of the last 2")
    assert stays[f"night {DAYS[4]}"] == f"nightly {DAYS[4]} is open; may be repeated (lake.rerun_days 1)"
    assert stays[f"event table version {world[2][4]['ingest']['bound']['delta_version']}"] == f"read by {DAYS[4]}"
    console = Console(width=150)
    with console.capture() as shown:
        console.print(render_pruned(told))
    assert f"would go: {readable_bytes(sum(gone.values()))}" in shown.get()
    assert "nothing was removed; run it without --dry-run" in shown.get()


def test_what_is_needed_stays_and_records_too(world: World, pruned: tuple[Path, dict[str, Any]]) -> None:
    """Of a pruned night manifests and page are left, of a kept version in one its checkpoint; the registry keeps the record."""
    home, _ = pruned
    folder = home / "nights" / GONE
    assert {path.name for path in folder.iterdir()} == {"manifests", "page.html"}
    kept = {path.name.partition("-")[0] for path in (home / "nights" / ROOT).iterdir()}
    assert kept == {"manifests", "checkpoint", "vocabulary"}
    for day in DAYS[3:]:
        assert files(home) >= {name for name in files(world[1]) if name.startswith(f"nights/{day}/")}
    models = registry(home)
    assert models.version(2).tags["pruned"] == "1970-01-01T00:00:00.000005Z"
    assert [models.model_bytes(version) > 0 for version in (1, 2, 3, 4)] == [True, False, True, True]
    assert registry(world[1]).model_bytes(2) > 0, "the home that was copied lost a model"
    last = entries_of(home)[-1]
    assert (last.kind, last.payload["versions"]) == ("pruned", [2])
    assert last.payload["nights"] == [str(day) for day in DAYS[:3]]


def test_a_second_run_finds_nothing_and_says_nothing_new(world: World, home: Path) -> None:
    """No journal entry, no file touched."""
    before, count = files(home), len(entries_of(home))

    assert prune(world[0], home)["removed"] == []

    assert files(home) == before
    assert len(entries_of(home)) == count


def test_nights_go_on_after_pruning(world: World, home: Path) -> None:
    """The open night ends from its packs, its stage repeats equal, rollback finds the previous one."""
    config, _, done = world

    _, again = run(config, home, DAYS[4], *FEW)

    assert again["pack"]["train"]["reused"]
    assert again["pack"]["train"]["digest"] == done[4]["pack"]["train"]["digest"]
    assert (again["finish"]["version"], again["finish"]["parent"]) == (5, 4)
    settings = load_config(config, list(FEW))
    told = moving.rollback(settings, str(home), reason="clicks fell", at_us=9)
    best = champion(entries_of(home))
    assert told["champion"] == (4 if again["finish"]["gate"] == "promoted" else 3)
    assert best is not None
    assert (Path(best.checkpoint) / "manifest.json").exists()
    assert best.checkpoint.startswith(f"{home}/"), "a copied home names its own files"

    forced = open_night(settings, str(home), DAYS[3], at_us=10, force="train")
    kept = {name: _manifest(home, DAYS[3], name) for name in ("vocabulary", "train")}
    packs = {role: _manifest(home, DAYS[3], f"pack-{role}") for role in sequencing.ROLES}
    assert training.train(forced, packs, kept["vocabulary"])["digest"] == kept["train"]["digest"]


def _manifest(home: Path, day: Any, name: str) -> dict[str, Any]:
    manifest = store.read_json(str(home / "nights" / str(day) / "manifests" / f"{name}.json"))
    result: dict[str, Any] = manifest["result"]
    uri = result["uri"].partition("/nights/")[2]
    return {**result, "uri": f"{home}/nights/{uri}", "fingerprint": manifest["fingerprint"]}


@pytest.mark.parametrize(
    "call",
    [
        lambda config, home: moving.promote(config, home, 2, reason="r", at_us=9),
        lambda config, home: moving.rollback(config, home, 2, reason="r", at_us=9),
        lambda config, home: comparing.compare(config, home, 2, 4),
        lambda config, home: open_night(config, home, DAYS[4], at_us=9, parent_version=2),
        lambda config, home: reevaluating.find_model(home, entries_of(Path(home)), "2"),
    ],
    ids=["promote", "rollback", "compare", "parent", "evaluate"],
)
def test_a_pruned_version_is_refused_by_name(
    world: World, pruned: tuple[Path, dict[str, Any]], call: Callable[..., Any]
) -> None:
    """One clear error that says when it was pruned and what to do; nothing has changed."""
    before = snapshot(pruned[0])

    with pytest.raises(UsageError, match=r"version 2 was pruned at 1970-01-01T00:00:00.000005Z: .*name a version that"):
        call(load_config(world[0], list(FEW)), str(pruned[0]))

    assert snapshot(pruned[0]) == before


def test_a_stage_of_a_pruned_night_cannot_be_repeated(world: World, pruned: tuple[Path, dict[str, Any]]) -> None:
    """--force says that the night was pruned, and which ones are not."""
    with pytest.raises(UsageError, match=rf"night {GONE} was pruned at .* the last lake.rerun_days \(1\) days can"):
        open_night(load_config(world[0], list(FEW)), str(pruned[0]), DAYS[1], at_us=9, force="pack")


def test_a_retraction_goes_back_to_a_version_that_is_still_there(world: World, home: Path, no_mlflow: None) -> None:
    """Every ancestor since the third day is tainted: the champion is the root, since version 2 has no checkpoint."""
    from gr_core.stages import erasing

    config = load_config(world[0], list(FEW))
    told = erasing.retract(config, str(home), date=DAYS[2], commit=None, reason="bots", at_us=9)

    assert told["tainted"] == [3, 4]
    assert told["next_parent"] == 1
    night, _ = run(world[0], home, DAYS[4], *FEW, stop_after="sequences")
    assert night.parent is not None
    assert (night.parent.version, night.parent.checkpoint.startswith(f"{home}/")) == (1, True)


def test_a_forgotten_user_is_not_held_by_what_was_pruned(world: World, home: Path) -> None:
    """`forget` names the versions whose weights are still there, and no others."""
    user = next(str(n) for n in range(40) if _trained(n))
    held = [one["what"] for one in forget(world[0], home, user)["still_held_by"]]

    assert [what.split()[2].rstrip(":") for what in held if what.startswith("model version")] == ["1", "3", "4"]


def _trained(user: int) -> bool:
    from gr_core.hashing import is_holdout

    return not is_holdout(str(user), 0.25)


@pytest.mark.parametrize("where", ["entry", "first folder", "later folder", "model", "tag", "table"])
def test_a_killed_prune_is_finished_by_the_next(
    world: World, pruned: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever was done when it died, the second run leaves the same files, one entry, and an equal registry."""
    home = tmp_path / "home"
    shutil.copytree(world[1], home)
    with monkeypatch.context() as patch:
        _die(patch, where)
        with pytest.raises(KeyboardInterrupt):
            prune(world[0], home)

    prune(world[0], home, at_us=6)

    assert files(home) == files(pruned[0])
    assert [entry.kind for entry in entries_of(home)].count("pruned") == 1
    assert "pruned" in registry(home).version(2).tags
    assert prune(world[0], home, dry_run=True)["removed"] == []


def _die(patch: pytest.MonkeyPatch, where: str) -> None:
    """Let the run die there."""
    if where == "entry":
        patch.setattr(Journal, "append", interrupt)
    elif where in ("model", "tag"):
        patch.setattr("gr_core.stages.pruning._remover", lambda *_: lambda: None)
        name = "mlflow.store.artifact.local_artifact_repo.LocalArtifactRepository.delete_artifacts"
        patch.setattr(name if where == "model" else "mlflow.MlflowClient.set_model_version_tag", interrupt)
    elif where == "table":
        patch.setattr("gr_core.lake.events.EventTable.maintain", interrupt)
    else:
        real, calls = store.remove_tree, iter([False] * (where == "later folder") * 3 + [True])

        def remove_tree(uri: str) -> None:
            if next(calls):
                raise KeyboardInterrupt
            real(uri)

        patch.setattr(store, "remove_tree", remove_tree)


def test_a_home_without_nights_is_not_made(world: World, tmp_path: Path) -> None:
    """There is nothing to prune, and nothing is written; --keep takes at least one version."""
    assert prune(world[0], tmp_path / "none") == {"dry_run": False, "removed": [], "kept": []}
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="--keep takes a number of versions from 1 on, got 0"):
        prune(world[0], world[1], keep=0)


def test_a_running_night_is_not_disturbed(world: World) -> None:
    """Prune refuses beside it."""
    with night_lock(str(world[1]), "2025-06-05"), pytest.raises(UsageError, match="2025-06-05 is running"):
        prune(world[0], world[1])
    assert nights(entries_of(world[1]))[GONE].is_finished
