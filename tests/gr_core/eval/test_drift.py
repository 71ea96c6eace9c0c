"""Drift: what is a trigger, what is noise, and what is compared with what."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import numpy as np
import pytest

from gr_core.drift_config import DriftConfig
from gr_core.eval import drift
from gr_core.eval.drift import Figures, judge

ROOT_DAY = date(2025, 6, 1)
STEADY = [0.80, 0.81, 0.79, 0.80, 0.82, 0.80]


def series(values: list[float | None], *, root: int = 1, root_day: date = ROOT_DAY, **more: Any) -> list[Figures]:
    """Return nights from the day after a root on, with these NEs and a standard error of 0.01."""
    return [
        Figures(
            date=str(root_day + timedelta(days=1 + n)),
            root=root,
            root_date=str(root_day),
            ne=value,
            ne_error=0.01,
            **more,
        )
        for n, value in enumerate(values)
    ]


def kinds(nights: list[Figures], **settings: Any) -> list[str]:
    return [one["kind"] for one in judge(nights, DriftConfig(**settings)).triggers]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([*STEADY, 0.95, 0.94], ["ne"]),
        ([*STEADY, 0.95, 0.80], []),
        ([*STEADY, 0.80, 0.95], []),
        ([*STEADY, 0.83, 0.83], []),
        ([0.80, 0.80, 0.95, 0.95], []),
        ([*STEADY, None, 0.95], []),
        ([None, 0.80, 0.81, 0.80, 0.95, 0.94], ["ne"]),
    ],
    ids=["two nights", "one bad night", "first night", "within", "too few before", "undefined", "undefined before"],
)
def test_ne_must_rise_for_nights_in_a_row(values: list[float | None], expected: list[str]) -> None:
    """One bad night is no drift, nor is a small rise, nor one with nothing to compare with."""
    assert kinds(series(values)) == expected


def test_a_rise_within_the_noise_of_few_users_is_none() -> None:
    """The same rise, measured on so few users that its standard error is as large, is no trigger."""
    noisy = [replace(night, ne_error=0.10) for night in series([*STEADY, 0.95, 0.94])]

    assert kinds(noisy) == []
    assert kinds(noisy, standard_errors=0.5) == ["ne"]


def test_false_alarms_are_rare_without_drift() -> None:
    """Over 400 lineages of 27 nights without drift, errors as measured, one night in 200 at most is a trigger."""
    rng, alarms, judged = np.random.default_rng(0), 0, 0
    for _ in range(400):
        nights = [replace(n, ne_error=0.03) for n in series([0.8 + 0.03 * e for e in rng.standard_normal(27)])]
        for end in range(5, 28):
            alarms += bool(judge(nights[:end], DriftConfig()).triggers)
            judged += 1

    assert alarms / judged <= 1 / 200


def test_a_lineage_is_compared_with_the_one_before_at_equal_age() -> None:
    """Worse than the lineage before was at that age; its own past is too short to tell."""
    before = series([0.80] * 10)
    since = series([0.90, 0.91, 0.90], root=7, root_day=ROOT_DAY + timedelta(days=10))
    found = judge([*before, *since], DriftConfig())

    assert [one["kind"] for one in found.triggers] == ["equal_age"]
    assert found.metrics["drift/ne_change_equal_age"] == pytest.approx(0.125)
    assert found.metrics["drift/ne_change"] is None
    assert kinds([*before, *since[:1]]) == [], "one night"


def test_a_new_lineage_starts_its_own_past() -> None:
    """After a full retrain the old lineage's nights are no baseline: what was drift is the usual now."""
    before = series([*STEADY, 0.95, 0.95])
    since = series([0.82] * 6, root=9, root_day=ROOT_DAY + timedelta(days=8))

    assert kinds([*before, *since]) == []


def test_scores_and_features_that_move_are_triggers_and_samples_of_one_distribution_are_not() -> None:
    """The stability index counts beyond what so few events show by chance."""
    rng = np.random.default_rng(1)

    def night(number: int, mean: float, home: float) -> Figures:
        chosen = rng.random(300) < home
        values = {"home": int(chosen.sum()), "search": int((~chosen).sum())}
        scores = drift.histogram(rng.normal(mean, 1.0, 300))
        return replace(
            series([0.8])[0], date=str(ROOT_DAY + timedelta(days=number)), scores=scores, features={"s": values}
        )

    steady = [night(number, 0.0, 0.6) for number in range(1, 9)]
    moved = [night(number, 1.5, 0.6) for number in (9, 10)]
    other = [night(number, 0.0, 0.1) for number in (9, 10)]

    assert kinds(steady) == []
    assert kinds([*steady, *moved]) == ["psi"]
    found = judge([*steady, *other], DriftConfig())
    assert [one["message"].split(" ")[4] for one in found.triggers] == ["s"]
    assert found.metrics["drift/psi/s"] > 0.25


def test_the_scores_of_a_model_that_still_gets_better_are_no_drift() -> None:
    """Spread and NE as on the embedded world's first nights; the same scores at an NE that has not fallen are drift."""
    rng = np.random.default_rng(2)
    scores = [drift.histogram(rng.normal(-1.6, spread, 20_000)) for spread in (0.3, 0.8, 1.2, 1.8, 2.0)]

    def young(values: list[float | None]) -> list[Figures]:
        return [replace(one, scores=counts) for one, counts in zip(series(values), scores, strict=True)]

    assert kinds(young([0.957, 0.835, 0.765, 0.730, 0.716])) == []
    assert kinds(young([0.835, 0.835, 0.835, 0.830, 0.825])) == ["psi"]
    assert kinds(young([None] * 5)) == ["psi"], "nothing says that it got better"


def test_the_stability_index_is_the_textbook_one() -> None:
    """Shares 0.5/0.5 against 0.8/0.2: 0.3 ln 1.6 + 0.3 ln 2.5."""
    index, chance = drift.psi(np.array([50.0, 50.0]), np.array([80.0, 20.0]))

    assert index == pytest.approx(0.3 * np.log(1.6) + 0.3 * np.log(2.5))
    assert 0 < chance < 0.1


def test_a_histogram_keeps_what_lies_beyond_and_drops_what_is_not_finite() -> None:
    """Logits beyond the limit count in the outermost bins, the last one's upper border too."""
    counts = drift.histogram([-99.0, -8.0, 7.999, 8.0, 99.0, float("nan"), float("inf")])

    assert (counts[0], counts[-1], sum(counts)) == (2, 3, 5)


def test_ids_without_rows_are_a_trigger() -> None:
    """Three in ten events on unknown ids, where it was one in ten, two nights in a row."""
    steady = series([0.8] * 6, unknown_ids={"item_id": 0.1})
    more = [replace(night, unknown_ids={"item_id": 0.3}) for night in series([0.8] * 8)[6:]]

    assert kinds([*steady, *more]) == ["unknown_ids"]
    assert kinds([*steady, *more[1:]]) == []


def test_a_full_retrain_is_due_after_so_many_days_and_0_means_never() -> None:
    """28 days after the root it is, 27 days after it is not."""
    nights = series([0.8] * 28)

    assert kinds(nights) == ["schedule"]
    assert kinds(nights[:-1]) == []
    assert kinds(nights, max_days=0) == []
