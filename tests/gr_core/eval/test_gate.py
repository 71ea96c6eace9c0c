from types import SimpleNamespace

import numpy as np
import pytest

from gr_core.config import GateConfig
from gr_core.eval.gate import Decision, Scores, compare, decide, promotion_chance
from gr_core.eval.metrics import losses

CONFIG = GateConfig()
EQUAL, WORSE_BY_MARGIN = 1.0, 1.409  # noise of the challenger over the champion's; measured: NE +0.0 % and +1.0 %


def world(users: int, seed: int, challenger_noise: float = EQUAL) -> tuple[Scores, Scores]:
    """Two models that see the true logit through independent noise; users have tastes, so rows are not independent."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), rng.poisson(5, users) + 1)
    truth = rng.normal(0, 0.7, users)[owner] - 1 + rng.normal(0, 0.8, len(owner))
    labels = (rng.random(len(owner)) < 1 / (1 + np.exp(-truth))).astype(int)
    names = [f"u{user}" for user in owner]
    noises = rng.normal(0, 0.25, (2, len(owner))) * np.array([[1.0], [challenger_noise]])
    champion, challenger = (Scores((truth + noise).astype(np.float32), labels, names, "rows") for noise in noises)
    return champion, challenger


def gate(champion: Scores | None, challenger: Scores, config: GateConfig = CONFIG, **more) -> Decision:
    return decide(
        champion, challenger, config, **{"challenger_date": "2025-06-02", "champion_date": "2025-06-01"} | more
    )


def better(scores: Scores, shift: float = 0.3) -> Scores:
    """A challenger whose every logit is moved towards the label."""
    moved = scores.logits + shift * (2 * scores.labels - 1)
    return Scores(moved.astype(np.float32), scores.labels, scores.users, scores.digest)


def promoted_share(noise: float, nights: int = 100) -> float:
    """Share of simulated nights that are promoted at the size the gate is configured for."""
    config = GateConfig(num_resamples=200)
    decisions = [gate(*world(1200, seed, noise), config, seed=seed).promote for seed in range(nights)]
    return float(np.mean(decisions))


def test_an_equal_challenger_on_newer_data_is_promoted():
    """Case G10: at the configured size, at least 80 % of equal challengers are promoted."""
    assert promoted_share(EQUAL) >= 0.80


def test_a_challenger_worse_by_the_margin_is_held():
    """Case G10: worse by the margin is promoted in 1 night of 20 at most (and two standard errors of 100 nights)."""
    assert promoted_share(WORSE_BY_MARGIN) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 100)


def test_the_bootstrap_matches_the_ratio_of_losses():
    """The difference is that of the NEs on the same rows; its standard error shrinks with the square root of users."""
    few, many = world(400, 0), world(6400, 0)
    small, large = compare(*few, 0.95, 1000, 0), compare(*many, 0.95, 1000, 0)
    sums = [losses(scores.labels, scores.logits).sum() for scores in few]

    assert small.difference == pytest.approx(sums[1] / sums[0] - 1)
    assert small.difference < small.upper
    assert small.standard_error / large.standard_error == pytest.approx(4, rel=0.15)


def test_the_decision_repeats_with_its_seed():
    """Equal inputs and seed give an equal decision; the order of rows does not matter beyond rounding."""
    champion, challenger = world(300, 1)
    order = np.random.default_rng(0).permutation(len(champion.labels))
    mixed = [
        Scores(s.logits[order], s.labels[order], [s.users[i] for i in order], s.digest) for s in (champion, challenger)
    ]

    assert compare(champion, challenger, 0.95, 200, 5) == compare(champion, challenger, 0.95, 200, 5)
    assert compare(*mixed, 0.95, 200, 5).upper == pytest.approx(compare(champion, challenger, 0.95, 200, 5).upper)


def test_many_users_are_drawn_in_groups(monkeypatch: pytest.MonkeyPatch):
    """Grouping users for speed leaves the standard error where it was."""
    pair = world(4000, 2)
    alone = compare(*pair, 0.95, 1000, 0).standard_error
    monkeypatch.setattr("gr_core.eval.gate._MAX_UNITS", 1000)

    assert compare(*pair, 0.95, 1000, 0).standard_error == pytest.approx(alone, rel=0.15)


def test_a_better_challenger_passes_and_says_so():
    """The reason for a promotion is `gate passed`; the figures hold what it was decided on."""
    champion, _ = world(600, 3)
    found = gate(champion, better(champion))

    assert (found.promote, found.reasons) == (True, ["gate passed"])
    assert found.figures["upper_bound"] < 0
    assert found.figures["ne_challenger"] < found.figures["ne_champion"]
    assert found.figures["rows_champion"] == found.figures["rows_challenger"] == "rows"


def test_a_worse_challenger_is_held_with_bound_and_margin():
    """The reason names the bound and the margin, as in example 7."""
    champion, _ = world(600, 3)
    found = gate(better(champion), champion)
    upper = found.figures["upper_bound"]

    assert not found.promote
    assert found.reasons == [f"gate.ne.click: upper bound {upper:+.3f} relative, margin +0.010"]


def test_twelve_positives_are_insufficient_data():
    """Case G10: 12 positives and NE 1 % better is `insufficient_data`, held by the default policy."""
    labels = np.array([1] * 12 + [0] * 40)
    logits = np.where(labels == 1, -0.6, -1.5).astype(np.float32)
    champion = Scores(logits, labels, [f"u{n}" for n in range(52)], "rows")
    found = gate(champion, better(champion, 0.02))

    assert (found.promote, found.figures["positives"]) == (False, 12)
    assert found.reasons == ["insufficient_data: 12 positives of click, gate.min_positives 200"]


@pytest.mark.parametrize(("shift", "promote"), [(0.0, True), (3.0, False)], ids=["sane", "not calibrated"])
def test_policy_may_promote_when_sane(shift, promote):
    """promote_if_sane: too little data promotes what is calibrated and better than the base rate, nothing else."""
    labels = np.array([1] * 12 + [0] * 36)
    logits = np.where(labels == 1, -0.4, -1.4).astype(np.float32)
    users = [f"u{n}" for n in range(48)]
    champion, challenger = (
        Scores(logits, labels, users, "rows"),
        Scores(logits + np.float32(shift), labels, users, "rows"),
    )
    found = gate(champion, challenger, GateConfig(insufficient_data="promote_if_sane"))

    assert found.promote is promote
    assert any(reason.startswith("insufficient_data") for reason in found.reasons)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_is_insufficient_data(label):
    """Case G5: an undefined NE is never compared, not even by the lenient policy."""
    scores = Scores(np.zeros(300, np.float32), np.full(300, label), [f"u{n}" for n in range(300)], "rows")
    found = gate(scores, scores, GateConfig(insufficient_data="promote_if_sane"))

    assert not found.promote
    assert found.reasons[0].startswith("insufficient_data")
    assert found.figures["ne_challenger"] is None


@pytest.mark.parametrize("who", ["challenger", "champion"])
def test_nan_never_passes(who):
    """A logit that is not finite holds, whichever model it is from."""
    champion, _ = world(600, 3)
    broken = Scores(champion.logits.copy(), champion.labels, champion.users, "rows")
    broken.logits[5] = np.nan
    found = gate(champion, broken) if who == "challenger" else gate(broken, better(champion))

    assert not found.promote
    assert found.reasons == [f"gate.finite.click: 1 of the {who}'s logits are not finite"]


def test_models_are_compared_on_identical_rows_only():
    """Case G2: other rows hold, however good the challenger looks."""
    champion, _ = world(600, 3)
    other = better(champion)
    found = gate(champion, Scores(other.logits, other.labels, other.users, "other rows"))

    assert not found.promote
    assert found.reasons[0].startswith("gate.rows")


@pytest.mark.parametrize("day", ["2025-05-22", "2025-06-01"])
def test_an_older_data_day_never_takes_over(day):
    """Case G1: a backfilled day at or before the champion's is held, however good, and says why."""
    champion, _ = world(600, 3)
    found = gate(champion, better(champion), challenger_date=day)

    assert not found.promote
    assert found.reasons == [f"gate.date: data day {day} is not after the champion's 2025-06-01"]


def test_red_data_checks_hold():
    """Data checks that are not green hold a good challenger."""
    champion, _ = world(600, 3)
    found = gate(champion, better(champion), data_ok=False)

    assert (found.promote, found.reasons) == (False, ["gate.data: the night's data checks are not green"])


def test_calibration_outside_the_band_holds():
    """A good ranking with probabilities far off is held by name."""
    champion, _ = world(600, 3)
    shifted = better(champion, 1.5)
    found = gate(champion, Scores(shifted.logits + np.float32(2.0), shifted.labels, shifted.users, "rows"))

    assert not found.promote
    assert [reason for reason in found.reasons if reason.startswith("gate.calibration.click: ")]


def test_the_first_model_needs_no_champion():
    """No champion: NE below 1 and better than smoothed counts promotes as `first model`."""
    _, challenger = world(600, 3)
    rate = np.full(len(challenger.labels), challenger.labels.mean())
    found = gate(None, challenger, champion_date=None, baseline=rate)

    assert (found.promote, found.reasons) == (True, ["first model"])
    assert found.figures["ne_baseline"] == pytest.approx(1.0)


def test_a_first_model_worse_than_counting_is_held():
    """No champion: smoothed counts that do better, or NE of 1 and more, hold."""
    _, challenger = world(600, 3)
    good = better(challenger, 2.0)
    beaten = gate(None, challenger, champion_date=None, baseline=1 / (1 + np.exp(-good.logits)))
    useless = Scores(np.zeros_like(challenger.logits), challenger.labels, challenger.users, "rows")
    no_better = gate(None, useless, GateConfig(calibration=(0.1, 9.0)), champion_date=None)

    assert not beaten.promote
    assert beaten.reasons[0].startswith("gate.baseline.click: NE")
    assert not no_better.promote
    assert no_better.reasons[0].startswith("gate.ne.click: ")


def test_small_losses_may_not_add_up():
    """A challenger far behind the last full retrain is held although it equals the champion."""
    champion, challenger = world(1500, 4)
    found = gate(champion, challenger, full_retrain=better(challenger, 0.5))

    assert not found.promote
    assert found.reasons[-1].startswith("gate.cumulative.click: ")


def test_scores_take_the_rows_where_the_action_is_known():
    """Scores of a pack keep rows with the action's bit known and its own column; packs join in order."""
    scored = SimpleNamespace(
        logits=np.array([[1], [2], [3]], np.float32),
        action_bits=[1],
        labels=np.array([0b10, 0b01, 0b10], np.int32),
        label_known=np.array([0b11, 0b01, 0b10], np.int32),
        time=np.zeros(3, np.int64),
        users=["a", "b", "c"],
        digest="d",
    )
    one = Scores.of(scored, 1)
    two = Scores.concat([one, one])

    assert (one.logits.tolist(), one.labels.tolist(), one.users) == ([1, 3], [1, 1], ["a", "c"])
    assert Scores.concat([one]).digest == "d"
    assert (len(two.labels), two.users) == (4, ["a", "c", "a", "c"])
    assert two.digest == Scores.concat([one, one]).digest


@pytest.mark.parametrize(
    ("standard_error", "difference", "expected"), [(0.011, 0, 0.23), (0.011, -0.015, 0.73), (0.011, 0.01, 0.05)]
)
def test_power_matches_the_table(standard_error, difference, expected):
    """Example 4.3: chance of promotion at margin 1 %, confidence 95 %."""
    assert promotion_chance(standard_error, difference, CONFIG) == pytest.approx(expected, abs=0.006)


def test_the_ratchet_asks_for_the_interval_not_the_point():
    """A loss to the last full retrain that may be above the cumulative margin is held; well below it, it passes."""
    champion, challenger = world(400, 6)
    root = better(challenger, 0.1)
    loss = compare(root, challenger, CONFIG.confidence, CONFIG.num_resamples, 0)
    tight = GateConfig(cumulative_margin=loss.difference + 0.5 * loss.standard_error, margin=0.2)
    wide = GateConfig(cumulative_margin=loss.difference + 4 * loss.standard_error, margin=0.2)
    held, passed = (gate(champion, challenger, config, full_retrain=root) for config in (tight, wide))

    assert (held.promote, passed.promote) == (False, True)
    assert held.reasons[0].startswith("gate.cumulative.click: upper bound +")
    assert held.figures["cumulative_difference"] < tight.cumulative_margin < held.figures["cumulative_upper_bound"]


@pytest.mark.parametrize(("broken", "told"), [("nan", "gate.finite.click: 1 of the last full"), ("rows", "gate.rows")])
def test_a_last_full_retrain_that_cannot_be_compared_holds(broken, told):
    """NaN, or other rows: the ratchet is not passed."""
    champion, challenger = world(600, 7)
    logits = champion.logits.copy()
    logits[3] = np.nan if broken == "nan" else logits[3]
    root = Scores(logits, champion.labels, champion.users, "rows" if broken == "nan" else "other rows")
    found = gate(champion, better(challenger), full_retrain=root)

    assert not found.promote
    assert found.reasons[0].startswith(told)
