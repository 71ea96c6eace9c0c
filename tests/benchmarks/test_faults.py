"""The faults benchmark with a kill on a tiny feed, without Prefect; and that it sees what is not as it was."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from benchmarks import _disk, _faults, faults
from benchmarks._report import Report
from gr_core.config import load_config
from tests.beside import score_here, train_here
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
FIRST, SECOND = (tiny.FIRST_DAY + timedelta(days=n) for n in range(2))


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> faults.Stand:
    """Run the first night, and an undisturbed second one in a copy, once and in this process; kills meet processes."""
    folder = tmp_path_factory.mktemp("faults")
    config = tiny.make(folder, days=0)
    for day in (FIRST, SECOND):
        tiny.write_day(folder / "raw", day, rows=200)

    work = folder / "work"
    base, calm, key = work / "base", work / "calm", str(SECOND)
    settings = load_config(config)
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        score_here(patch)
        run(config, base, FIRST)
        _faults.promote_first(settings, base)
        _faults.copy_home(base, calm)
        started = time.perf_counter()
        run(config, calm, SECOND)
        seconds = time.perf_counter() - started

    def command(home: Path) -> list[str]:
        return [sys.executable, "-m", "tests.night_process", str(config), str(home), key]

    stands = _faults.standing(settings, calm, key)
    # a process has imports to do first
    return faults.Stand(
        base=base, work=work, config=settings, key=key, command=command, calm=stands, seconds=2 * seconds
    )


def test_a_night_killed_in_training_ends_as_the_undisturbed_one(stand: faults.Stand) -> None:
    """A kill of the whole process group, then the same command: same champion, counts, metrics and checkpoint."""
    trial = faults.disturb(stand, "stages", 4, "train")

    assert (trial.hit, trial.differs, trial.status) == (["train"], [], 0)
    assert {"ingest", "pack"} <= set(trial.taken_up)
    assert stand.calm["checkpoint"] == stand.calm["digest"]
    assert stand.calm["kinds"] == ["decided", "finished"]
    assert [status for _, status in stand.calm["runs"]] == ["FINISHED"] * 6


def test_every_trial_counts(stand: faults.Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure a kind, one trial a stage, seeds that differ; one night that is not as the undisturbed one misses the goal."""
    asked: list[tuple[str, int, str]] = []

    def disturb(_: faults.Stand, kind: str, seed: int, stage: str = "") -> _faults.Trial:
        asked.append((kind, seed, stage))
        return _faults.Trial(kind=kind, seed=seed, differs=["digest"] if (kind, seed) == ("twice", 7) else [])

    monkeypatch.setattr(faults, "disturb", disturb)
    report = Report()
    for kind in ("kills", "twice", "stages"):
        faults.measure(report, stand, [kind], 8, 7)

    assert asked[:10] == [*(("kills", 7 + n, "") for n in range(8)), ("twice", 7, ""), ("twice", 8, "")]
    assert [stage for *_, stage in asked[10:]] == list(_faults.STAGES)
    assert {name: figure.value for name, figure in report.figures.items()} == {
        f"{kind}/nights_as_undisturbed": number for kind, number in (("kills", 8), ("twice", 1), ("stages", 9))
    }
    assert report.missed() == ["twice/nights_as_undisturbed"]
    assert len(report.conditions["trials"]) == 19
    assert faults.table_of([]).columns[3].header == "hit"


def test_what_is_not_as_undisturbed_is_seen(stand: faults.Stand) -> None:
    """The home before the night differs in more than one thing, and the stage that a kill met is told by manifests."""
    before = _faults.standing(stand.config, stand.base, stand.key)

    assert {"state", "digest", "champion"} <= set(_faults.differing(stand.calm, before))
    assert _faults.differing(stand.calm, stand.calm) == []
    assert _faults.stage_hit(stand.base, stand.key, 2) == "before open"
    assert _faults.stage_hit(stand.base, str(FIRST), 2) == "after finish"


def test_one_error_object_with_a_name_is_clear_and_nothing_else_is() -> None:
    """Two lines, a traceback, or an exception of a library do not count."""
    assert _disk._error('{"error": {"type": "StoreFull", "message": "m", "where": "w"}}') is not None
    for out in ("", "text", '{"error": {"type": "OSError", "message": "m"}}', '{"error": {"type": "StoreFull"}}\n{}'):
        assert _disk._error(out) is None
