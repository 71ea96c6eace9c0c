"""Whom a challenger is measured against: the champion and the lineage's root, on the challenger's own rows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gr_core.config import parse_config
from gr_core.errors import ConfigError
from gr_core.lake.journal import Champion, champion
from gr_core.night import Night
from gr_core.retrain import open_retrain
from gr_core.stages import gating, judging, rescoring, rivals
from tests.erased import SECOND, THIRD, entries_of
from tests.plain import run

Third = tuple[Night, Champion, dict[str, Any], rivals.Holdout]


@pytest.fixture(scope="module")
def third(poisoned: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Third:
    """Return a third night up to its training, from champion 2, whose root is version 1."""
    home = tmp_path_factory.mktemp("third") / "home"
    shutil.copytree(poisoned[2], home)
    night, done = run(poisoned[0], home, THIRD, stop_after="evaluate")
    standing = champion(entries_of(home))
    assert standing is not None
    holdout = rivals.Holdout(
        pack=done["pack"]["holdout"], words=done["vocabulary"], ingested=done["ingest"], buckets=done["sequences"]
    )
    return night, standing, done, holdout


@pytest.fixture(scope="module")
def challenger(third: Third) -> Any:
    """Return the third night's scores of its holdout."""
    night, _, done, holdout = third
    return judging.score(night, done["train"]["uri"], holdout.pack, holdout.words)


def test_the_last_full_retrain_is_scored_on_the_same_rows(third: Third, challenger: Any) -> None:
    """Champion 2 and root 1 score the challenger's own rows; the decision has the root's NE and both ends of the interval."""
    night, standing, done, holdout = third

    others = rivals.score_all(night, standing, challenger, holdout)
    figures = gating.decide(night, done["train"], challenger, others, standing, data_ok=True).figures

    assert (standing.version, rivals.root(night, standing), others.troubles) == (2, 1, [])
    first = judging.registered(night.journal.entries(), 1)["checkpoint"]
    assert others.full_retrain is not None
    assert (others.full_retrain.logits == judging.score(night, first, holdout.pack, holdout.words).logits).all()
    assert others.champion is not None
    assert others.champion.digest == others.full_retrain.digest == challenger.digest
    assert figures["ne_full_retrain"] / figures["ne_champion"] == pytest.approx(
        (1 + figures["difference"]) / (1 + figures["cumulative_difference"])
    )
    assert figures["cumulative_lower_bound"] < figures["cumulative_difference"] < figures["cumulative_upper_bound"]


def test_a_champion_of_other_features_is_scored_on_the_same_rows(third: Third, challenger: Any) -> None:
    """A full retrain without `surface`, which the champion reads: it gets sequences of its own, and its scores stay its own."""
    night, standing, done, holdout = third
    model = {**night.config["model"], "context_features": []}
    words = {"item_id": night.config["vocabulary"]["item_id"]}
    other = replace(
        night, mode="full_retrain", parent=None, config={**night.config, "model": model, "vocabulary": words}
    )
    before = sorted(Path(night.home).rglob("*"))

    found = rivals.aligned(rivals.score_version(other, standing.version, holdout), challenger)

    usual = rivals.score_version(night, standing.version, holdout)
    assert found.digest == challenger.digest
    assert np.allclose(found.logits, usual.logits, atol=1e-5)
    rows = rescoring.Rows(
        role="next_day",
        pack=done["pack"]["next_day"],
        words=holdout.words,
        ingested=holdout.ingested,
        buckets=holdout.buckets,
    )
    own = judging.score(night, standing.checkpoint, rows.pack, rows.words)  # as the next-night check and `evaluate` do
    entries = night.journal.entries()
    again = rescoring.score(other, entries, rescoring.Model.of(entries, standing.version), rows)
    assert np.allclose(rivals.aligned(again, own).logits, own.logits, atol=1e-5)
    assert len(own.labels) > 0
    assert not np.allclose(found.logits, challenger.logits, atol=1e-3)
    assert sorted(Path(night.home).rglob("*")) == before


def test_a_feature_that_the_champion_reads_must_stay_in_the_source(third: Third) -> None:
    """A full retrain that could not be gated is refused before it begins, with the column's name."""
    night, _, _, _ = third
    raw = json.loads(json.dumps(night.config))
    for feed in raw["source"]["feeds"]:
        feed["side"] = {}
    raw["model"]["context_features"] = []
    del raw["vocabulary"]["surface"]
    entries = night.journal.entries()

    with pytest.raises(
        ConfigError, match=r"champion, version 2, reads \['surface'\], which this config no longer gives"
    ):
        open_retrain(parse_config(raw), night.home, SECOND, at_us=1)
    assert night.journal.entries() == entries


def test_what_equals_the_champion_and_fell_behind_the_root_is_held(third: Third, challenger: Any) -> None:
    """Each night lost less than the margin; together they lost more than the cumulative one, and the reason says so."""
    night, standing, done, _ = third
    root = replace(challenger, logits=challenger.logits + (np.where(challenger.labels & 1, 1, -1) * 2.0)[:, None])
    others = rivals.Rivals(champion=challenger, full_retrain=root)
    strict = replace(night, config={**night.config, "gate": {**night.config["gate"], "calibration": [0.01, 100.0]}})

    found = gating.decide(strict, done["train"], challenger, others, standing, data_ok=True)

    assert not found.promote
    (reason,) = found.reasons
    assert reason == (
        f"gate.cumulative.click: upper bound {found.figures['cumulative_upper_bound']:+.3f} relative to the last full "
        f"retrain, gate.cumulative_margin {night.settings.gate.cumulative_margin:+.3f}"
    )


def test_a_root_whose_checkpoint_is_gone_holds_by_name(
    third: Third, challenger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that cannot be checked is not passed; the reason names the version and what to do."""
    night, standing, _, holdout = third
    real = judging.registered

    def lost(entries: Any, version: int) -> dict[str, Any]:
        return real(entries, version) | ({"checkpoint": "/nowhere"} if version == 1 else {})

    monkeypatch.setattr(judging, "registered", lost)
    others = rivals.score_all(night, standing, challenger, holdout)

    assert others.champion is not None
    assert others.full_retrain is None
    (trouble,) = others.troubles
    assert trouble.startswith("gate.cumulative.click: the last full retrain, version 1, cannot be scored")


@pytest.mark.parametrize("mode", ["full_retrain", "full-retrain"])
def test_a_full_retrain_is_measured_against_the_champions_root(third: Third, mode: str) -> None:
    """It is a root itself, so what it must not fall behind is the full retrain that the champion comes from."""
    night, standing, _, _ = third

    assert rivals.root(replace(night, mode=mode, parent=None), standing) == 1
    assert rivals.root(replace(night, parent=None), None) is None


def test_a_root_that_is_the_champion_is_scored_once(
    third: Third, challenger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second night of a lineage the champion is the root."""
    night, standing, _, holdout = third
    scored: list[int] = []
    monkeypatch.setattr(rivals, "score_version", lambda _n, version, _h: scored.append(version) or challenger)

    others = rivals.score_all(night, replace(standing, version=1), challenger, holdout)

    assert (scored, others.full_retrain) == ([1], others.champion)
