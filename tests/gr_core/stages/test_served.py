"""The gate judges the registered model, as a fresh process loads it; one that differs from what was evaluated is held."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.tiny as tiny
from gr_core.errors import DaybreakError
from gr_core.night import Night
from gr_core.registry import fresh
from gr_core.stages import gating
from tests.beside import score_here
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
SCORES_IN_A_PROCESS = True
Registered = tuple[Path, Callable[[], dict[str, Any]]]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Night, dict[str, Any]]:
    """Run a night up to its registration; returns the home, the night and every stage's result."""
    folder = tmp_path_factory.mktemp("served")
    return folder / "home", *run(tiny.make(folder, days=1), folder / "home", tiny.FIRST_DAY, stop_after="register")


@pytest.fixture
def registered(night: tuple[Path, Night, dict[str, Any]], tmp_path: Path) -> Iterator[Registered]:
    """Return the registered model's folder, put right again afterwards, and a gate that decides anew."""
    home, opened, done = night
    (model,) = (path.parent for path in home.rglob("MLmodel"))
    shutil.copytree(model, tmp_path / "kept")

    def decide() -> dict[str, Any]:
        (home / "nights" / opened.key / "manifests" / "gate.json").unlink(missing_ok=True)
        rest = (done["pack"]["holdout"], done["vocabulary"], done["ingest"], done["sequences"])
        return gating.gate(opened, done["register"], done["train"], *rest)

    yield model, decide
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", model)


def test_the_gate_judges_what_a_fresh_process_loads(registered: Registered) -> None:
    """Case G3: the model's own code, in a process outside the checkout, scores as the night's own evaluation did."""
    model, decide = registered
    found = decide()

    assert found["gate"] == "promoted"
    assert 0 <= found["figures"]["artifact_difference"] <= fresh.TOLERANCE
    assert not list(model.rglob("__pycache__"))


def test_files_that_the_registry_lost_are_uploaded_again(
    registered: Registered, night: tuple[Path, Night, dict[str, Any]], tmp_path: Path
) -> None:
    """Lost before the gate judged: the night's next attempt uploads them to their place, as the same version (E11)."""
    model, decide = registered
    home, _, done = night
    shutil.rmtree(model)
    held = decide()

    again = run(home.parent / "tiny.toml", home, tiny.FIRST_DAY, stop_after="register")[1]["register"]

    assert held["gate"] == "held"
    assert "is not there; run its night again" in held["reasons"][0]
    assert (again["reused"], again["version"]) == (False, done["register"]["version"])
    names = [{str(path.relative_to(top)) for path in top.rglob("*")} for top in (model, tmp_path / "kept")]
    assert names[0] == names[1]
    for path in (tmp_path / "kept").rglob("data/checkpoint/*.*"):
        assert (model / path.relative_to(tmp_path / "kept")).read_bytes() == path.read_bytes()


def edit(path: Path, old: str, new: str) -> None:
    """Change a line of the model's own code."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_model_that_serves_other_scores_is_held(registered: Registered) -> None:
    """Case G3: the same weights under other code score otherwise; the gate holds, and says by how much."""
    model, decide = registered
    edit(model / "code/gr_core/eval/scoring.py", "there).cpu()", "there).cpu() + 2e-5")
    found = decide()

    assert found["gate"] == "held"
    assert found["reasons"][0].startswith(
        "gate.artifact: registered version 1 scores the holdout with logits up to 2e-05"
    )
    assert found["reasons"][0].endswith("apart from the night's own evaluation, at most 1e-05 is allowed")


def test_a_model_that_needs_unpickling_is_held(registered: Registered) -> None:
    """Case B9: pickle loading is off, also for code that asks for it."""
    model, decide = registered
    edit(
        model / "code/gr_core/registry/scorer.py",
        "return RequestScorer(Path(path))",
        "import pickle; return RequestScorer(pickle.loads(pickle.dumps(Path(path))))",
    )
    found = decide()

    assert found["gate"] == "held"
    assert found["reasons"][0].endswith("ImportError: the model needs unpickling, which is switched off")


def damage(model: Path) -> None:
    """Flip a byte of the weights."""
    weights = next(model.rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize(("harm", "told"), [(damage, "damaged (sha256)"), (shutil.rmtree, "is not there")])
def test_a_damaged_or_missing_artifact_is_held(registered: Registered, harm: Callable[[Path], None], told: str) -> None:
    """Nothing of it is loaded; the reason names the file, and the night's own metrics still stand."""
    model, decide = registered
    harm(model)
    found = decide()

    assert found["gate"] == "held"
    assert found["reasons"][0].startswith("gate.artifact: registered version 1: ")
    assert told in found["reasons"][0]
    assert found["holdout"]["click"]["count"] > 0


@pytest.mark.parametrize(
    ("program", "limit", "error", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, DaybreakError, "ended by signal 9"),
        ("import time; time.sleep(60)", 0.2, fresh.FormatError, "did not score the holdout in 0.2 s"),
        ("raise SystemExit(3)", 60.0, fresh.FormatError, "does not load or score"),
        ("pass", 60.0, fresh.FormatError, "scores of another checkpoint"),
    ],
    ids=["killed", "hangs", "fails", "writes nothing"],
)
def test_a_process_that_gives_no_scores_is_named(
    night: tuple[Path, Night, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    limit: float,
    error: type[DaybreakError],
    told: str,
) -> None:
    """A killed process fails the attempt, which is repeated; one that cannot score is the model's fault, so a hold."""
    home, _, done = night
    (model,) = (path.parent for path in home.rglob("MLmodel"))
    places = (Path(done["train"]["uri"]), Path(done["pack"]["holdout"]["uri"]), Path(done["vocabulary"]["uri"]))
    monkeypatch.setattr(fresh, "PROGRAM", program)

    with pytest.raises(error, match=told) as caught:
        fresh.score(model, *places, tmp_path, limit_seconds=limit)
    assert type(caught.value) is error


def test_scores_from_beside_training_alone_hold_nothing(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept scores may come from another device: where they differ, this process scores the checkpoint before it holds."""
    _, decide = registered
    score_here(monkeypatch)
    real = gating.score_challenger

    def elsewhere(*arguments: Any) -> Any:
        scored = real(*arguments)
        scored.logits[:] += 1e-3
        return scored

    monkeypatch.setattr(gating, "score_challenger", elsewhere)
    found = decide()

    assert found["gate"] == "promoted"
    assert found["figures"]["artifact_difference"] <= fresh.TOLERANCE
