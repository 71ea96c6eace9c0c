"""A challenger that is good overall and bad on one slice is held by name; noise and small slices hold nobody."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gr_core.config import GateConfig
from gr_core.eval.gate import Decision, Scores, decide
from gr_core.eval.slices import Slicing
from gr_core.eval.vetoes import with_vetoes

CONFIG = GateConfig(num_resamples=200)
PLACES = np.repeat([0, 1], [4500, 1500])  # search is a quarter of the rows
SURFACE = Slicing("surface", ("feed", "search"), PLACES)


def pair(seed: int, *, worse: float = 0.0, better: float = 0.1) -> tuple[Any, Any]:
    """Return scores of champion and challenger on 6000 rows of 1000 users; on search the challenger's are `worse` off."""
    rng = np.random.default_rng(seed)
    users = np.arange(6000) % 1000
    truth = rng.normal(0, 0.7, 1000)[users] - 0.5 + rng.normal(0, 0.8, 6000)
    labels = (rng.random(6000) < 1 / (1 + np.exp(-truth))).astype(np.int32)
    noise = rng.normal(0, 0.25, (2, 6000))
    moved = truth + noise[1] + np.where(PLACES == 1, -worse, better) * (2 * labels - 1)
    champion, challenger = (
        SimpleNamespace(
            logits=logits.astype(np.float32)[:, None],
            action_bits=[0],
            labels=labels,
            label_known=np.ones(6000, np.int32),
            time=np.zeros(6000, np.int64),
            users=[f"u{user}" for user in users],
            digest="rows",
        )
        for logits in (truth + noise[0], moved)
    )
    return champion, challenger


def judged(champion: Any, challenger: Any, config: GateConfig = CONFIG, slicing: Slicing = SURFACE) -> Decision:
    days = {"challenger_date": "2025-06-02", "champion_date": "2025-06-01"}
    whole = decide(Scores.of(champion, 0), Scores.of(challenger, 0), config, **days)
    return with_vetoes(whole, champion, challenger, [slicing], config, bit=0)


def test_a_challenger_good_overall_and_bad_on_one_slice_is_held() -> None:
    """Better on all rows, far worse on search: the reason names slice, figure, margin and positives; feed is no matter."""
    champion, challenger = pair(1, worse=0.25, better=0.2)
    positives = int(champion.labels[PLACES == 1].sum())

    whole = decide(
        Scores.of(champion, 0),
        Scores.of(challenger, 0),
        CONFIG,
        challenger_date="2025-06-02",
        champion_date="2025-06-01",
    )
    found = judged(champion, challenger)

    assert whole.promote
    assert whole.figures["difference"] < 0
    assert not found.promote
    feed, search = found.figures["slices"]
    assert (feed["verdict"], search["verdict"]) == ("passed", "veto")
    assert found.reasons == [
        f"gate.slice.click.surface=search: NE {search['difference']:+.3f} relative, lower bound {search['lower']:+.3f}, "
        f"margin +0.050, {positives} positives in 1500 rows of {search['users']} users"
    ]
    assert search["lower"] > 0.05
    assert {key: found.figures[key] for key in whole.figures} == whole.figures


def test_a_slice_that_may_not_veto_is_only_reported() -> None:
    """`veto = false`, or a wider margin, leaves the decision as it was, figures beside it."""
    bad = pair(1, worse=0.25, better=0.2)
    quiet = judged(*bad, slicing=replace(SURFACE, veto=False))
    wide = judged(*bad, CONFIG.model_copy(update={"slice_margin": 0.5}))

    assert (quiet.promote, quiet.reasons) == (wide.promote, wide.reasons) == (True, ["gate passed"])
    assert [one["verdict"] for one in quiet.figures["slices"]] == ["reported", "reported"]
    assert [one["verdict"] for one in wide.figures["slices"]] == ["passed", "passed"]


def test_too_few_positives_hold_nobody() -> None:
    """Case G5: below gate.slice_min_positives, and with one class alone, a slice is insufficient data: null, no veto."""
    champion, challenger = pair(1, worse=0.25, better=0.2)
    positives = int(champion.labels[PLACES == 1].sum())
    few = judged(champion, challenger, CONFIG.model_copy(update={"slice_min_positives": positives + 1}))
    for one in (champion, challenger):
        one.labels = np.where(PLACES == 1, 0, one.labels)
    none = judged(champion, challenger, CONFIG.model_copy(update={"slice_min_positives": 1}))

    for found, count in ((few, positives), (none, 0)):
        search = found.figures["slices"][1]
        assert (search["verdict"], search["positives"], search["count"]) == ("insufficient_data", count, 1500)
        assert search["difference"] is search["lower"] is search["upper"] is None
    assert (few.promote, few.reasons) == (True, ["gate passed"])


def test_equal_challengers_are_not_held_by_their_slices() -> None:
    """Forty equal ones, twenty slices each: no veto, so slices do not cost the promotions that the gate's size promises."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(40):
        slicing = Slicing("s", tuple("abcdefghijklmnopqrst"), rng.integers(0, 20, 6000))
        sides = pair(seed, better=0.0)
        config = GateConfig(num_resamples=100, slice_min_positives=50)
        held += not with_vetoes(Decision(True, ["gate passed"]), *sides, [slicing], config, bit=0).promote
    assert held <= 1


def test_a_slice_worse_by_the_margin_holds_as_seldom_as_promised() -> None:
    """At the margin itself the lower end lies above it in at most 1 - confidence of the draws (and two errors of 60)."""
    config, found = GateConfig(num_resamples=100, confidence=0.9), []
    probe = [judged(*pair(seed, worse=0.05, better=0.05), config).figures["slices"][1] for seed in range(60)]
    margin = float(np.mean([one["difference"] for one in probe]))  # what `worse` amounts to
    found = [one["lower"] > margin for one in probe]
    assert margin > 0
    assert np.mean(found) <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / 60)


@pytest.mark.parametrize("case", ["no champion", "other rows", "nan", "no slices"])
def test_what_cannot_be_compared_leaves_the_decision_as_it_was(case: str) -> None:
    """The gate has said all there is to say."""
    champion, challenger = pair(1, worse=0.25)
    decision = Decision(False, ["gate.rows: other rows"], {"count": 6000})
    if case == "other rows":
        champion.digest = "others"
    if case == "nan":
        challenger.logits = challenger.logits * np.float32("nan")
    sides = (None if case == "no champion" else champion, challenger)

    assert with_vetoes(decision, *sides, [] if case == "no slices" else [SURFACE], CONFIG, bit=0) is decision


def test_a_held_challenger_is_told_of_its_slices_too() -> None:
    """The gate's own reasons stand first, the slices' after them; what is known of few rows is not taken for all."""
    champion, challenger = pair(1, worse=0.25, better=0.2)
    found = with_vetoes(
        Decision(False, ["gate.calibration.click: 1.500, band 0.8 to 1.25"]),
        champion,
        challenger,
        [SURFACE],
        CONFIG,
        bit=0,
    )
    for one in (champion, challenger):
        one.label_known = np.where(PLACES == 1, 0, 1)
    unknown = with_vetoes(Decision(True, ["gate passed"]), champion, challenger, [SURFACE], CONFIG, bit=0)

    assert [reason.split(":")[0] for reason in found.reasons] == [
        "gate.calibration.click",
        "gate.slice.click.surface=search",
    ]
    assert [one["count"] for one in unknown.figures["slices"]] == [4500, 0]
    assert unknown.promote
