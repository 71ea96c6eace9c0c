"""The golden home: three nights that an earlier state of this release wrote are read, and the next night goes on from them.

Where a test here fails, a change made existing homes unreadable: keep reading what is stored, or raise the format number of
what changed so that the refusal names it, and say in docs/operations.md what to do; then `python -m tests.golden.make_home`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from gr_core.config import load_config
from gr_core.lake.journal import Journal, champion, nights
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.registry.scorer import RequestScorer
from gr_core.stages import paging
from tests.beside import score_here, train_here
from tests.golden.make_home import ARCHIVE, DAYS, unpack
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Unpack the home, far from where it was made; returns config and home. The tests use it in their order."""
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        score_here(patch)
        yield unpack(tmp_path_factory.mktemp("golden"))


def ask(capsys: pytest.CaptureFixture[str], golden: tuple[Path, Path], *words: str) -> dict[str, Any]:
    """Return the object of a command that is done."""
    assert main([*words, "--config", str(golden[0]), "--home", str(golden[1]), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_it_is_small_and_names_no_machine(golden: tuple[Path, Path]) -> None:
    """It is committed: under 300 kB, no code of ours in it, and its files belong to nobody."""
    assert ARCHIVE.stat().st_size < MAX_BYTES
    with tarfile.open(ARCHIVE) as archive:
        assert {(one.uid, one.uname) for one in archive} == {(0, "")}
        assert not [one.name for one in archive if one.name.endswith(".py")]


def test_its_nights_are_shown(golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`status` has all of them, in states that add up, and the champion."""
    told = ask(capsys, golden, "status")

    assert told["champion"]["version"] == 3
    assert [night["date"] for night in told["nights"]] == [str(day) for day in DAYS[:3]]
    for night in told["nights"]:
        assert night["state"] == "completed"
        rows = night["rows"]
        assert rows["read"] == rows["committed"] + rows["duplicates"] + rows["quarantined"] + rows["forgotten"] > 0
        assert night["due_events"] == night["supervised_events"] + night["holdout_events"]


def test_its_versions_are_compared_on_the_same_rows(
    golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Packs, vocabularies and checkpoints are read where the home lies now: both versions score one holdout."""
    told = ask(capsys, golden, "compare", "2", "3")

    assert told["data"]["b"]["holdout"]["events"] > 0
    assert told["metrics"]["holdout/ne/click"]["delta"] is not None


def test_its_page_and_what_prune_keeps_are_told(golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The page of any night is written again from journal and manifests; nothing so recent would be pruned."""
    page = Path(paging.write(str(golden[1]), str(DAYS[1]))["page"])

    assert page.is_relative_to(golden[1])
    assert "No result was left by" not in page.read_text()
    told = ask(capsys, golden, "prune", "--dry-run")
    assert [one for one in told["removed"] if not one["what"].startswith("event table")] == []


def test_the_next_night_goes_on_from_it(golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The fourth night starts from the champion's checkpoint and vocabulary, learns what is new, and is registered."""
    config, home = golden

    night, done = run(config, home, DAYS[3])

    assert night.parent is not None
    assert night.parent.version == 3
    assert done["finish"]["state"] == "completed"
    assert done["finish"]["new_events"] > 0
    assert done["register"]["version"] == 4
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "tiny")
    for version in (1, 4):
        folder = Path(models.version(version).source.removeprefix("file://"))
        assert folder.is_relative_to(home)
        scored = RequestScorer(folder / "data" / "checkpoint").score(
            [{"shown_at": 1748822400000000, "history": [], "candidates": [1, 2]}]
        )
        assert len(scored["scores_click"][0]) == 2
    assert nights(Journal(str(home / "lake" / "journal")).entries())[str(DAYS[3])].is_finished


def test_an_operator_goes_back(golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Roll back to a version of the golden home; its aliases are repaired."""
    config, home = golden
    ask(capsys, golden, "rollback", "--to", "2", "--reason", "looked worse")

    best = champion(Journal(str(home / "lake" / "journal")).entries())
    assert best is not None
    assert best.version == 2
    assert Path(best.checkpoint).is_relative_to(home)
    models = MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), load_config(config).name)
    assert models.aliases()["champion"] == 2
