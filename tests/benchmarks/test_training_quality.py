"""Quality's side of the training benchmark: packs of some days, retrains against nights, layouts by seed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _incremental, _layouts
from benchmarks._nights import open_day, run_data
from benchmarks._repack import between, repack
from benchmarks._report import Report
from benchmarks._shuffle import read_segments
from gr_core.config import Config, load_config
from gr_core.data.batches import PackReader
from gr_core.data.packfile import Segments
from gr_core.stages import training
from gr_core.train import loop
from gr_core.train.run import read_run

CONF = Path(__file__).parents[2] / "conf" / "world.toml"
SMALL = (
    "source.world.num_users=60",
    "source.world.bot_events=10",
    "lake.num_buckets=1",
    "model.width=16",
    "model.num_layers=1",
    "train.num_threads=1",
    "train.save_every_steps=0",
    "source.world.taste_shift_day=2",
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A small world whose nights train in this process."""

    def train_here(run: Path, *_args: Any, **_options: Any) -> None:
        loop.train(read_run(run), lambda _line: None)

    monkeypatch.setattr(training, "run_training", train_here)
    return load_config(CONF, SMALL)


def segments(supervised: tuple[int, ...] = (0, 0, 0, 1, 1)) -> Segments:
    """Return one user: three history tokens and two targets, the second of which sees the last two of them."""
    columns = {
        "item_id": np.arange(10, 15, dtype=np.int32),
        "lo": np.array([0, 0, 0, 0, 1], np.int32),
        "hi": np.array([0, 1, 2, 2, 3], np.int32),
        "position": np.array([0, 1, 2, 2, 3], np.int32),
        "time": np.array([1, 2, 3, 4, 9], np.int64),
        "supervise": np.array(supervised, np.uint8),
    }
    return Segments(columns=columns, lengths=np.array([5]), users=["u"], event_ids=["first", "second"])


def test_the_newest_targets_keep_what_they_see_and_nothing_else() -> None:
    """The second target alone: history 1 and 2, its interval counted from the new beginning; event and user stay."""
    kept = between(segments(), since_us=5)

    assert kept.columns["item_id"].tolist() == [11, 12, 14]
    assert kept.columns["lo"].tolist() == [0, 0, 0]
    assert kept.columns["hi"].tolist() == [0, 1, 2]
    assert kept.columns["position"].tolist() == [0, 1, 2]
    assert list(kept.users) == ["u"]
    assert kept.event_ids.to_pylist() == ["second"]


def test_the_oldest_targets_lose_the_history_behind_them() -> None:
    """The first target alone sees two history tokens; the third goes."""
    kept = between(segments(), since_us=None, until_us=5)

    assert kept.columns["item_id"].tolist() == [10, 11, 13]
    assert kept.event_ids.to_pylist() == ["first"]


def test_segments_without_a_target_go() -> None:
    """Nothing shown in the window leaves nothing."""
    kept = between(segments(), since_us=100)

    assert len(kept.lengths) == len(kept.users) == len(kept.event_ids) == 0


def test_the_interval_is_students() -> None:
    """Mean 2, standard error 1 / sqrt(3), 4.303 of them; one seed has no interval."""
    assert _layouts.interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert _layouts.interval([1.0]) == (1.0, None)


def test_equal_ne_is_within_the_tolerance() -> None:
    """Better or at most a fifth of a percent worse; an undefined NE reaches nothing."""
    assert _incremental.reaches({"ne": 0.9017}, {"ne": 0.9})
    assert not _incremental.reaches({"ne": 0.9019}, {"ne": 0.9})
    assert not _incremental.reaches({"ne": None}, {"ne": 0.9})


def test_retrains_are_judged_on_the_nights_own_rows(world: Config, tmp_path: Path) -> None:
    """Incremental and from scratch: equal rows; yesterday only trains fewer tokens than all days; figures by night."""
    assert world.source.world is not None
    sizes = {"nights": 3, "judged": (2,), "windows": ((2, 1), (_incremental.ALL, 2))}
    report = Report()
    _incremental.measure_incremental(report, tmp_path, "world", world, world.source.world.start, sizes)
    (day,) = report.conditions["incremental/world"]["days"]

    assert day["night"] == 2
    assert {arm["count"] for arm in (day["incremental"], *day["retrains"])} == {day["incremental"]["count"]}
    assert day["incremental"]["count"] > 0
    assert [arm["tokens"] for arm in day["retrains"]] == sorted(arm["tokens"] for arm in day["retrains"])
    assert {name.rpartition("/")[2] for name in report.figures} == {
        "ne",
        "tokens_fraction",
        "seconds_fraction",
        "ne_yesterday_only",
    }


def test_layouts_are_compared_seed_by_seed(world: Config, tmp_path: Path) -> None:
    """Every arm has an AUC a seed; packs hold the same events in the arm's layout and the seed's order."""
    assert world.source.world is not None
    start = world.source.world.start
    report = Report()
    sizes = {"seeds": (0, 1), "nights": 2, "judged_from": 2}
    _layouts.measure_layouts(report, tmp_path, "world", world, start, sizes)
    second = (start + timedelta(days=1)).isoformat()
    packs = tmp_path / "layouts-world" / "nights"
    readers = {
        name: PackReader(packs / f"{second}{name}" / "packs" / "train")
        for name in ("", "-packed-none-1", "-padded-none-0")
    }

    assert set(report.figures) == {f"layouts/world/{arm}/auc_difference" for arm in _layouts.ARMS[1:]}
    assert all(set(by_seed) == {0, 1} for by_seed in report.conditions["layouts/world"]["auc_by_seed"].values())
    assert len({tuple(sorted(reader.targets()[0])) for reader in readers.values()}) == 1
    assert len({reader.digest for reader in readers.values()}) == 3
    assert readers["-padded-none-0"].index["layout"] == "padded"


def test_passes_repeat_every_segment(world: Config, tmp_path: Path) -> None:
    """Two passes hold twice the tokens, and read back as the same segments."""
    assert world.source.world is not None
    night = open_day(world, str(tmp_path / "home"), world.source.world.start)
    source = Path(run_data(night).packs["train"]["uri"])
    twice = repack(source, tmp_path / "twice", passes=2)
    once, _ = read_segments(source)
    both, _ = read_segments(tmp_path / "twice")

    assert twice["num_tokens"] == 2 * once.num_tokens
    assert sorted(both.users) == sorted(list(once.users) * 2)
