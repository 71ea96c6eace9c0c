"""The gate's power: the figures of example 4.3, and what nights of one's own change."""

from __future__ import annotations

from typing import Any

import pytest

from gr_core.config import GateConfig
from gr_core.eval.power import ENOUGH, gate_power, measured_difference, measured_spread, nights_needed


def gate(**changes: Any) -> GateConfig:
    return GateConfig(**{"nights": 1, "margin": 0.01, "confidence": 0.95, **changes})


@pytest.mark.parametrize(
    ("users", "low", "high"),
    [(165, 0.008, 0.0115), (391, 0.005, 0.008), (478, 0.005, 0.008), (876, 0.003, 0.005), (8800, 0.0012, 0.002)],
)
def test_the_standard_error_is_that_of_the_measured_table(users: int, low: float, high: float) -> None:
    """Example 4.3: 2, 5, 10 and 100 % of the users."""
    error = gate_power(users, gate()).standard_error

    assert error is not None
    assert low <= error <= high


@pytest.mark.parametrize(
    ("margin", "confidence", "error", "equal", "worse"),
    [
        (0.01, 0.9, 0.011, 0.35, 0.10),
        (0.01, 0.9, 0.005, 0.76, 0.10),
        (0.01, 0.95, 0.011, 0.23, 0.05),
        (0.005, 0.95, 0.011, 0.12, 0.05),
    ],
)
def test_the_chances_are_those_of_the_example(
    margin: float, confidence: float, error: float, equal: float, worse: float
) -> None:
    """Example 4.3's second table, from a measured spread."""
    power = gate_power(100, gate(margin=margin, confidence=confidence), spread=error * 10)

    assert power.standard_error == pytest.approx(error)
    assert power.promoted_if_equal == pytest.approx(equal, abs=0.006)
    assert power.promoted_if_worse == pytest.approx(worse, abs=1e-6)


def test_the_nights_that_are_needed_are_the_fewest() -> None:
    """One night fewer has less than the wanted chance; more users need fewer nights."""
    needed = nights_needed(150, gate())

    assert needed is not None
    assert gate_power(150, gate(nights=needed)).promoted_if_equal >= ENOUGH
    assert gate_power(150, gate(nights=needed - 1)).promoted_if_equal < ENOUGH
    assert nights_needed(100_000, gate()) == 1
    assert nights_needed(1, gate(margin=0.001)) is None
    assert nights_needed(0, gate()) is None
    assert nights_needed(100, gate(margin=0.0)) is None


def test_past_nights_give_the_spread() -> None:
    """The median of the newest comparisons; first models and empty figures count for nothing."""
    told = [{"standard_error": 0.5, "users": 100}] + [{"standard_error": e, "users": 400} for e in (0.01, 0.02, 0.03)]

    assert measured_spread([{}, {"standard_error": None, "users": 9}]) is None
    assert measured_spread([*told, {}]) == pytest.approx(0.4)


def test_past_nights_give_what_challengers_brought() -> None:
    """The median of the newest three differences; a first model has none."""
    told = [{"difference": d} for d in (-0.1, None, -0.02, 0.004, -0.013)]

    assert measured_difference([{}, {"difference": None}]) is None
    assert measured_difference(told) == pytest.approx(-0.013)


def test_without_holdout_users_nothing_is_promoted_by_comparison() -> None:
    """The standard error is null then."""
    assert gate_power(0, gate()).to_json() == {
        "nights": 1,
        "users": 0,
        "standard_error": None,
        "promoted_if_equal": 0.0,
        "promoted_if_worse": 0.0,
    }
