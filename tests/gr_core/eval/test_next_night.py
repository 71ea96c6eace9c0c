"""The next-night check's verdict: worse beyond the margin on rows that neither was trained on, else nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gr_core.config import GateConfig
from gr_core.eval.gate import Scores
from gr_core.eval.next_night import Verdict, judge, metric_keys, told, untrained
from gr_core.next_night_config import NextNightConfig

RULES = NextNightConfig()
GATE = GateConfig(num_resamples=200)
USERS, EACH = 400, 10


def drawn(seed: int, worse: float = 0.0) -> tuple[Scores, Scores]:
    """Draw events of users who differ, and two models: the champion's logits are off by so much more (nats of logit)."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(rng.normal(-0.5, 1.0, USERS), EACH) + rng.normal(0, 0.7, USERS * EACH)
    labels = (rng.random(USERS * EACH) < 1 / (1 + np.exp(-truth))).astype(np.int32)
    users = [f"u{n}" for n in np.repeat(np.arange(USERS), EACH)]
    noise = rng.normal(0, 1, (2, USERS * EACH))
    logits = [truth + noise[0] * (0.3 + worse), truth + noise[1] * 0.3]
    return tuple(Scores(one.astype(np.float32), labels, users, "d") for one in logits)  # type: ignore[return-value]


def test_a_champion_that_is_clearly_worse_is_worse() -> None:
    """The reason names the difference, its lower end, how many events and users, and the margin."""
    champion, previous = drawn(0, worse=0.9)

    found = judge(champion, previous, RULES, GATE)

    assert found.worse
    figures = found.figures
    assert figures["lower_bound"] > RULES.margin
    assert figures["lower_bound"] < figures["difference"] < figures["upper_bound"]
    assert figures["difference"] == pytest.approx(figures["ne_champion"] / figures["ne_previous"] - 1)
    assert (figures["count"], figures["users"]) == (USERS * EACH, USERS)
    assert (figures["rows_champion"], figures["rows_previous"]) == ("d", "d")
    assert f"on {USERS * EACH} new events of {USERS} users" in found.reason
    assert not judge(previous, champion, RULES, GATE).worse


def test_chance_rolls_nothing_back() -> None:
    """Of 100 equal champions few are worse even without a margin, and hardly any beyond the default one.

    Bound: 11 or more of 100 have a chance of 1.1 % where each has 1 in 20.
    """
    fine = [judge(*drawn(seed), RULES.model_copy(update={"margin": 0.0}), GATE) for seed in range(1, 101)]

    assert sum(one.worse for one in fine) <= 10
    assert sum(one.figures["lower_bound"] > RULES.margin for one in fine) <= 2


def test_too_little_data_or_other_rows_conclude_nothing() -> None:
    """Few positives, no negatives, other rows, a previous champion without finite scores: not checked, and it says why."""
    champion, previous = drawn(0, worse=2.0)

    def few(scores: Scores, rows: slice) -> Scores:
        return Scores(scores.logits[rows], scores.labels[rows], scores.users[rows], scores.digest)

    first = slice(0, 100)
    assert int(champion.labels[first].sum()) < RULES.min_positives
    cases = [
        (few(champion, first), few(previous, first), "next_night.min_positives 200"),
        (few(champion, slice(0, 0)), few(previous, slice(0, 0)), "0 positives of click in 0 new events"),
        (champion, replace(previous, digest="other"), "different rows"),
        (champion, replace(previous, logits=previous.logits * np.float32("nan")), "previous champion's scores"),
    ]
    for ours, theirs, why in cases:
        found = judge(ours, theirs, RULES, GATE)
        assert not found.worse
        assert found.reason.startswith("not checked: ")
        assert why in found.reason


def test_a_champion_without_finite_scores_is_worse() -> None:
    """NaN never passes."""
    champion, previous = drawn(0)

    found = judge(replace(champion, logits=champion.logits * np.float32("inf")), previous, RULES, GATE)

    assert found.worse
    assert found.figures["ne_champion"] is None


def scored(**values: Any) -> Any:
    """Return a scored pack of four events; bit 0 is click, bit 1 like."""
    empty = {"logits": np.zeros((4, 2), np.float32), "labels": np.zeros(4, np.int32)}
    return SimpleNamespace(**empty, time=np.array([10, 20, 30, 40]), **values)


def test_only_rows_after_all_that_either_was_trained_on_count() -> None:
    """By action: known, and shown after the newest event of both lineages; an action never trained on has none."""
    rows = scored(label_known=np.array([1, 3, 3, 2]))

    assert untrained(rows, 0, "click", [{"click": 5}, {"click": 10}]).tolist() == [False, True, True, False]
    assert untrained(rows, 1, "like", [{"like": 5}, {"like": 30}]).tolist() == [False, False, False, True]
    assert not untrained(rows, 0, "click", [{"click": 5}, {}]).any()


def test_keys_are_those_of_mlflow() -> None:
    """Stable, by action; nothing where nothing was compared."""
    found = judge(*drawn(0), RULES, GATE)
    checked = {"champion": 2, "previous": 1, "worse": found.worse, "reason": found.reason, "figures": found.figures}

    keys = metric_keys(checked)
    assert keys["next_night/difference/click"] == found.figures["difference"]
    assert keys["next_night/worse"] is False
    assert metric_keys(None) == metric_keys({**checked, "figures": {}}) == {}
    assert set(told({**checked, "rolled_back": False, "seconds": 1.0})) == {*checked, "rolled_back"}
    assert Verdict(worse=False, reason="r").figures == {}
