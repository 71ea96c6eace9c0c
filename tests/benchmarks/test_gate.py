"""The benchmark of the gate at small sizes: what it draws is what it says, and the gate keeps its rates (case G10)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _planted, _simulated, gate
from benchmarks._figures import Report
from gr_core.config import Config, load_config

SMALL = ("source.world.num_users=400", "lake.holdout_fraction=0.5", "gate.num_resamples=200")
NIGHTS = 60
RARE = 1e-3
"""A test fails by chance this seldom at most."""


@pytest.fixture(scope="module")
def config() -> Config:
    """Return the embedded world's config with as many holdout users from fewer users."""
    return load_config(_simulated.CONF / "world.toml", list(SMALL))


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the report of some simulated nights."""
    made = Report()
    _simulated.measure_simulated(made, nights=NIGHTS, overrides=SMALL, worlds=3)
    return made


def promoted(report: Report, kind: str) -> int:
    """Return how many nights of a kind were promoted."""
    return round((report.figures[f"simulated/{kind}/promoted"].value or 0.0) * NIGHTS)


@pytest.mark.parametrize("kind", ["worse_by_margin", "worse_by_margin_shifted", "worse_by_cumulative_margin"])
def test_what_is_worse_by_the_margin_is_promoted_at_the_stated_rate_at_most(report: Report, kind: str) -> None:
    """Case G10: so many promotions or more would be rare at 1 in 20 (exact binomial tail)."""
    hits = promoted(report, kind)

    assert 1 - _simulated.binomial_below(hits, NIGHTS, 0.05) >= RARE


def test_equal_quality_is_promoted(report: Report) -> None:
    """Case G10: so few promotions or fewer would be rare at 80 %; better challengers are promoted more often still."""
    hits, better = promoted(report, "equal"), promoted(report, "better_by_half_margin")

    assert _simulated.binomial_below(hits + 1, NIGHTS, 0.8) >= RARE
    assert better >= hits


def test_nights_that_fell_behind_are_held_by_the_ratchet_alone(report: Report) -> None:
    """They equal their champion, so that nothing but the cumulative margin stands in their way."""
    told = report.conditions["simulated"]

    assert told["worse_by_cumulative_margin"]["held_by"]["gate.cumulative.click"] > 0.8 * NIGHTS
    assert told["worse_by_margin"]["held_by"].keys() <= {"gate.ne.click", "gate.calibration.click"}
    assert json.loads(json.dumps(told)) == told


def test_a_challenger_is_as_much_worse_as_it_is_said_to_be(config: Config) -> None:
    """The expected NE over worlds that it was not set on is the wanted one above the champion's."""
    worse = _simulated.worse_by(config, 0.02, by="own", worlds=3)
    sums = np.zeros(2)
    for seed in range(3):
        drawn, rng = _simulated.draw(config, seed), np.random.default_rng(seed)
        common = drawn.truth + _simulated.ERRORS.shared * rng.normal(size=len(drawn.truth))
        for place, errors in enumerate((_simulated.ERRORS, worse)):
            for _ in range(20):
                logits = common + errors.own * _simulated.noise(drawn, rng, errors)
                sums[place] += _simulated.cross_entropy(drawn.truth, logits).sum()

    assert sums[1] / sums[0] - 1 == pytest.approx(0.02, abs=0.004)


def test_a_holdout_is_the_worlds_own(config: Config) -> None:
    """Its users are the holdout's, its labels the world's draws: their rate is the mean probability, within four errors."""
    drawn = _simulated.draw(config, 5)
    p = 1 / (1 + np.exp(-drawn.truth))

    assert 100 < len(set(drawn.users)) <= 220
    assert abs(drawn.labels.mean() - p.mean()) < 4 * math.sqrt((p * (1 - p)).mean() / len(p))
    assert not (_simulated.draw(config, 6).truth[:50] == drawn.truth[:50]).all()


def test_users_share_a_part_of_a_models_error(config: Config) -> None:
    """Two rows of one user have correlated errors, so that users and not rows are what is independent."""
    drawn, rng = _simulated.draw(config, 1), np.random.default_rng(1)
    errors = replace(_simulated.ERRORS, by_user=0.5)
    found = np.stack([_simulated.noise(drawn, rng, errors) for _ in range(40)])
    first = np.flatnonzero(np.diff(drawn.number, prepend=-1) == 0)[:300]

    together = (found[:, first] * found[:, first - 1]).mean()
    assert found.std() == pytest.approx(1, abs=0.05)
    assert together == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"), [(0, 20, 0.0, 0.1684), (1, 20, 0.0013, 0.2487), (10, 20, 0.272, 0.728)]
)
def test_the_exact_interval_is_clopper_and_pearsons(hits: int, trials: int, low: float, high: float) -> None:
    """The textbook's figures at 95 %."""
    assert _simulated.exact_interval(hits, trials) == pytest.approx([low, high], abs=1e-4)


def test_a_shift_gives_the_wanted_mean() -> None:
    """The mean prediction is what was asked for, above or below the present one."""
    logits = np.random.default_rng(0).normal(-1.5, 1, 500)

    for wanted in (0.1, 0.35):
        moved = logits + _planted.shift_to(logits, wanted)
        assert (1 / (1 + np.exp(-moved))).mean() == pytest.approx(wanted)


def test_planted_challengers_are_trained_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind gets a decision from the gate, by command; the ruined ones are held even in a tiny world."""
    assert gate.main(["--quick", "--only", "planted", "--work", str(tmp_path), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    decisions = found["conditions"]["planted"]["decisions"]
    assert decisions.keys() == {"honest", *_planted.PLANTS}
    assert found["figures"]["planted/learning_rate_x100/held"]["value"] == 1
    assert found["figures"]["planted/item_table_zeroed/held"]["goal"] is None
    champion = {row["ne_champion"] for rows in decisions.values() for row in rows if "ne_champion" in row}
    assert len(champion) == 1
    assert decisions["calibration_x1.3"][0]["calibration_challenger"] > decisions["honest"][0]["calibration_challenger"]
