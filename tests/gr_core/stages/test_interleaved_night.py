"""Whole nights on item, action, item, action: packed, trained, scored and warm-started by the stages as they are."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from benchmarks._nights import NightResult, run_night
from gr_core.config import load_config
from gr_core.data.batches import PackReader
from gr_core.errors import ConfigError

OVERRIDES = ['pack.tokens="interleaved"', "train.replay_fraction=0.2", "train.half_life_days=1.5"]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> list[NightResult]:
    """Return two nights, the second warm-started, with replay and half-life on top."""
    folder = tmp_path_factory.mktemp("interleaved")
    config = load_config(tiny.make(folder, days=2), OVERRIDES)
    return [run_night(config, str(folder / "home"), tiny.FIRST_DAY + timedelta(days=n)) for n in range(2)]


def test_nights_train_and_score_on_interleaved_packs(nights: list[NightResult]) -> None:
    """The packs say their layout and replay; the second night is warm and the parent's scores are numbers."""
    for number, night in enumerate(nights):
        for role in ("train", "holdout"):
            index = PackReader(Path(night.packs[role]["uri"])).index
            assert index["tokens"] == "interleaved"
            assert len(index["segment_causal"]) == index["num_segments"]
            assert index["num_supervised"] == night.packs[role]["num_supervised"] > 0
        assert (PackReader(Path(night.packs["train"]["uri"])).index.get("num_replayed", 0) > 0) == (number > 0)
        assert math.isfinite(night.trained["metrics"]["train/loss"])
    assert nights[1].trained["step"] > nights[0].trained["step"] > 0
    scored = nights[1].evaluated["next_day"]["click"]
    assert scored["count"] > 100
    assert 0 < scored["ne"] < 2


def test_the_parent_learns_from_interleaved_tokens(nights: list[NightResult]) -> None:
    """Click odds depend on the user, whom only the history's actions tell: the next day's AUC shows that they are read."""
    auc = nights[1].auc("click")
    assert auc is not None
    assert auc > 0.65


def test_a_budget_for_one_token_an_entry_is_refused(tmp_path: Path) -> None:
    """Interleaved history takes two tokens an entry: a budget that holds it in targets alone is refused by name."""
    config = tiny.make(tmp_path, days=0)
    load_config(config, ["pack.token_budget=128", "sequences.max_history=100"])

    with pytest.raises(
        ConfigError, match=r"pack\.token_budget must be at least 2 \* sequences\.max_history \+ 1 = 201"
    ):
        load_config(config, ["pack.token_budget=128", "sequences.max_history=100", 'pack.tokens="interleaved"'])
