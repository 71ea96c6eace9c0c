"""Two models on the same rows: deltas, the gate's interval with both ends, days of the lake's zone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from gr_core.config import GateConfig
from gr_core.eval import gate as gates
from gr_core.eval import pairing, slicing
from gr_core.eval.scoring import Scored

ACTIONS = ["click", "shown", "like"]
SUPERVISED = 0b101
GATE = GateConfig(num_resamples=200, confidence=0.9)


def scored(noise: float, *, seed: int = 1, users: int = 60, digest: str = "rows") -> Scored:
    """Return scores of 600 events of which the truth is known but for noise; `like` is known of every other one."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(600, 2))
    hit = rng.random((600, 2)) < 1 / (1 + np.exp(-truth))
    midnight = int(datetime(2025, 6, 2, tzinfo=UTC).timestamp()) * 10**6
    return Scored(
        logits=(truth + noise * np.random.default_rng(seed).normal(size=(600, 2))).astype(np.float32),
        labels=(hit[:, 0] + 4 * hit[:, 1]).astype(np.int32),
        label_known=np.where(np.arange(600) % 2 == 0, 5, 1).astype(np.int32),
        time=midnight + (np.arange(600) - 300) * 60_000_000,
        users=[f"u{n % users}" for n in range(600)],
        event_ids=[f"e{n}" for n in range(600)],
        actions=["click", "like"],
        action_bits=[0, 2],
        digest=digest,
    )


def test_the_interval_is_the_gates() -> None:
    """NE's and log loss's ends are the gate's of the same rows, times a's own value; AUC's lie around its delta."""
    a, b = scored(0.0), scored(1.0, seed=2)

    found = pairing.pair(a, b, ACTIONS, SUPERVISED, GATE, seed=5)

    assert list(found) == ["click", "like"]
    for action, bit in (("click", 0), ("like", 2)):
        made = gates.compare(gates.Scores.of(a, bit), gates.Scores.of(b, bit), 0.9, 200, 5)
        for key in ("ne", "log_loss"):
            value = found[action][key]
            assert value["a"] is not None
            assert value["delta"] == pytest.approx(value["a"] * made.difference)
            assert value["high"] == pytest.approx(value["a"] * made.upper)
            assert value["low"] == pytest.approx(value["a"] * made.lower)
            assert made.lower > 0  # noise of one logit is worse, beyond doubt
        low, delta, high = (found[action]["auc"][key] for key in ("low", "delta", "high"))
        assert low < delta < high < 0
        assert delta - low == pytest.approx(high - delta)
        assert found[action]["calibration"]["low"] is found[action]["gauc_user_mean"]["high"] is None
    assert [found[action]["count"]["a"] for action in found] == [600, 300]


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_both_ends_miss_the_truth_as_often_as_promised(confidence: float) -> None:
    """Of two equally noisy models neither is better: each end passes zero in at most 1 - confidence of the draws."""
    passed = np.zeros(2)
    for draw in range(100):
        sides = (gates.Scores.of(scored(0.5, seed=2 * draw + side), 0) for side in (1, 2))
        made = gates.compare(*sides, confidence, 200, draw)
        assert made.lower <= made.difference <= made.upper
        passed += [made.lower > 0, made.upper < 0]
    assert (passed <= 100 * (1 - confidence) + 10).all()
    assert passed.sum() > 0  # and the ends are no wider than they need to be


def test_aucs_interval_misses_the_truth_as_often_as_promised() -> None:
    """Of two equally noisy models neither ranks better: each end passes zero in at most 1 - confidence of the draws."""
    passed = np.zeros(2)
    for draw in range(100):
        sides = [scored(0.5, seed=2 * draw + side) for side in (1, 2)]
        (made,) = pairing.pair(*sides, ["click"], 1, GateConfig(num_resamples=100, confidence=0.9)).values()
        passed += [made["auc"]["low"] > 0, made["auc"]["high"] < 0]
    assert (passed <= 10 + 10).all()
    assert passed.sum() > 2


def test_other_rows_are_refused() -> None:
    """Rows that differ tell nothing about a difference."""
    with pytest.raises(ValueError, match="only equal rows are paired, got row digests 'rows' and 'others'"):
        pairing.pair(scored(0), scored(0, digest="others"), ACTIONS, SUPERVISED, GATE)
    assert pairing.beside(1.0, 2.0, same_rows=False)["delta"] is None
    assert pairing.beside(None, 2.0)["delta"] is None
    assert pairing.beside(1.0, 2.5) == {"a": 1.0, "b": 2.5, "delta": 1.5, "low": None, "high": None}


def test_what_is_not_defined_is_null() -> None:
    """One user gives no interval, one class no NE, NaN nothing but counts."""
    one = pairing.pair(scored(0, users=1), scored(1, users=1), ACTIONS, SUPERVISED, GATE)["click"]["ne"]
    assert one["delta"] is not None
    assert (one["low"], one["high"]) == (None, None)

    never = replace(scored(0), labels=np.zeros(600, np.int32))
    click = pairing.pair(never, never, ACTIONS, SUPERVISED, GATE)["click"]
    assert click["ne"] == {"a": None, "b": None, "delta": None, "low": None, "high": None}
    assert click["log_loss"]["delta"] == 0

    broken = replace(scored(0), logits=np.full((600, 2), np.nan, np.float32))
    click = pairing.pair(scored(0), broken, ACTIONS, SUPERVISED, GATE)["click"]
    assert (click["ne"]["b"], click["ne"]["low"]) == (None, None)
    assert click["non_finite"]["b"] == 600


def test_days_are_those_of_the_lakes_zone() -> None:
    """300 minutes around UTC's midnight: two days there, three hours further east most of them are of the second."""
    a, b = scored(0), scored(1)

    utc, moscow = (
        pairing.by_slice(a, b, ACTIONS, SUPERVISED, GATE, [slicing.by_day(a.time, zone)])
        for zone in ("UTC", "Europe/Moscow")
    )

    counts = [
        {one["slice"]: one["count"] for one in found if one["key"] == "holdout/ne/click"} for found in (utc, moscow)
    ]
    assert counts[0] == {"day=2025-06-01": 300, "day=2025-06-02": 300}
    assert counts[1] == {"day=2025-06-01": 120, "day=2025-06-02": 480}
