"""Nights at the gate, simulated: the real decision on holdouts of the embedded world, where the truth about both models is known.

A night's holdout is that of conf/world.toml: the events of `gate.nights` days of a world of its own, those of its holdout
users, with the labels that the world drew. A model sees an event's true log-odds through errors: one part that both models
share (they come from one lineage), one of its own by event, one of its own by user, so that rows of a user are alike.
How large these are was measured on the world's own nights (`ERRORS`). How much worse a challenger is in the population is
set by the size of its own error, found on worlds apart from those that are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import Figure, Report
from gr_core.config import Config, load_config
from gr_core.data.population import Floats, World
from gr_core.data.world import NEVER, events_of
from gr_core.eval.gate import Decision, Scores, decide, promotion_chance
from gr_core.eval.power import ENOUGH
from gr_core.hashing import is_holdout

CONF = Path(__file__).parent.parent / "conf"
FIRST_NIGHT = 10
"""Day of a world, from 0, on which the judged nights begin."""
APART = 10**6
"""Seeds of worlds on which errors are set begin here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Standard deviations of a model's errors in log-odds."""

    shared: float = 0.5
    """Of the part that champion and challenger have in common."""
    own: float = 0.31
    """Of a model's own part."""
    by_user: float = 0.1
    """Share of the own part's variance that is one draw a user."""
    shift: float = 0.0
    """Added to every log-odds."""


ERRORS = Errors()
"""Of the world's own models: with these the gate measures the standard error of its nights 4 to 6 (0.0043 to 0.0045 with
`gate.nights` = 3) and their NE (0.70). Two nights' models differ by 0.35 in log-odds and by a shift besides, a tenth of the
variance by user; rows within a user are otherwise as good as independent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a kind of night is made of."""

    champion: Errors = ERRORS
    challenger: Errors = ERRORS
    full_retrain: Errors | None = ERRORS
    """None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A holdout, arrays [N]."""

    truth: Floats
    """Log-odds of the gate's action."""
    labels: Any
    users: list[str]
    number: Any
    """Users as numbers from 0."""


def draw(config: Config, seed: int) -> Drawn:
    """Draw the holdout of a night: `gate.nights` days of the world with this seed."""
    if config.source.world is None:
        raise ValueError("simulated nights need a config with source.world")
    world = replace(World.of(config.source.world), seed=seed)
    days = [events_of(world, world.start + timedelta(days=FIRST_NIGHT + n)) for n in range(config.gate.nights)]
    # the bot, number num_users, has a daily cap of its own and no part in the gate's question
    held = np.array(
        [n < world.num_users and is_holdout(f"u{n}", config.lake.holdout_fraction) for n in range(world.num_users + 1)]
    )
    kept = [held[day.user] for day in days]
    action = config.gate.action
    p = np.concatenate([day.probability[action][rows] for day, rows in zip(days, kept, strict=True)])
    acted = np.concatenate([day.acted_ms[action][rows] for day, rows in zip(days, kept, strict=True)])
    user = np.concatenate([day.user[rows] for day, rows in zip(days, kept, strict=True)])
    names, number = np.unique(user, return_inverse=True)
    return Drawn(
        truth=np.log(p) - np.log1p(-p),
        labels=(acted != NEVER).astype(np.int64),
        users=[f"u{names[n]}" for n in number.tolist()],
        number=number,
    )


def noise(drawn: Drawn, rng: np.random.Generator, errors: Errors) -> Floats:
    """Draw a model's own error of standard deviation 1 on every row [N], the user's part in it."""
    by_user = rng.normal(size=drawn.number.max() + 1)[drawn.number]
    by_row = rng.normal(size=len(drawn.truth))
    return np.asarray(math.sqrt(errors.by_user) * by_user + math.sqrt(1 - errors.by_user) * by_row)


def worse_by(config: Config, relative: float, *, by: str, worlds: int) -> Errors:
    """Return the errors of a model whose expected NE is so much above that of one with ERRORS.

    Args:
        config: The config.
        relative: NE over the other's, less 1; below 0: better.
        by: own (a larger error of its own) or shift (log-odds too high).
        worlds: How many worlds the expectation is taken over.
    """
    drawn = [draw(config, APART + n) for n in range(worlds)]
    rngs = [np.random.default_rng([APART, n]) for n in range(worlds)]
    shared = [ERRORS.shared * rng.normal(size=len(one.truth)) for one, rng in zip(drawn, rngs, strict=True)]
    # a few draws of the own error a world, the same for every size that is tried
    own = [[noise(one, rng, ERRORS) for _ in range(4)] for one, rng in zip(drawn, rngs, strict=True)]

    def expected(tried: Errors) -> float:
        return sum(
            float(cross_entropy(one.truth, one.truth + common + tried.shift + tried.own * e).sum())
            for one, common, many in zip(drawn, shared, own, strict=True)
            for e in many
        )

    wanted, low, high = (1 + relative) * expected(ERRORS), 0.0, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        tried = replace(ERRORS, **{by: middle})
        low, high = (middle, high) if expected(tried) < wanted else (low, middle)
    return replace(ERRORS, **{by: low})


def cross_entropy(truth: Floats, logit: Floats) -> Floats:
    """Return the expected log loss of log-odds [N] where `truth` are the right ones."""
    p = 1 / (1 + np.exp(-truth))
    return np.asarray(np.logaddexp(0, logit) - p * logit)


def night(config: Config, drawn: Drawn, seed: int, kind: Kind) -> Decision:
    """Let the gate decide on a drawn night.

    Args:
        config: The config; its gate decides.
        drawn: The holdout.
        seed: Of the models' errors and of the bootstrap.
        kind: The models.
    """
    rng = np.random.default_rng([1, seed])
    common = drawn.truth + ERRORS.shared * rng.normal(size=len(drawn.truth))

    def scores(errors: Errors) -> Scores:
        logits = common + errors.shift + errors.own * noise(drawn, rng, errors)
        return Scores(logits.astype(np.float32), drawn.labels, drawn.users, f"night-{seed}")

    champion, challenger = scores(kind.champion), scores(kind.challenger)
    return decide(
        champion,
        challenger,
        config.gate,
        challenger_date="2025-06-12",
        champion_date="2025-06-11",
        full_retrain=scores(kind.full_retrain) if kind.full_retrain else None,
        seed=seed,
    )


def kinds(config: Config, *, worlds: int) -> dict[str, Kind]:
    """Return each kind of night; those whose names begin with `worse` must be held."""
    gate = config.gate

    def worse(relative: float, by: str = "own") -> Errors:
        return worse_by(config, relative, by=by, worlds=worlds)

    fallen = worse(gate.cumulative_margin)
    return {
        "worse_by_margin": Kind(challenger=worse(gate.margin), full_retrain=None),
        "worse_by_margin_shifted": Kind(challenger=worse(gate.margin, "shift"), full_retrain=None),
        "worse_by_cumulative_margin": Kind(champion=fallen, challenger=fallen),
        "equal": Kind(),
        "better_by_half_margin": Kind(challenger=worse(-gate.margin / 2)),
    }


def measure_simulated(report: Report, *, nights: int, overrides: Sequence[str] = (), worlds: int = 8) -> None:
    """Add the share of simulated nights that are promoted, by what the challenger is worth.

    Args:
        report: Gets the figures.
        nights: Of each kind.
        overrides: Of conf/world.toml.
        worlds: How many worlds the challengers' errors are set on.
    """
    config = load_config(CONF / "world.toml", list(overrides))
    chosen = kinds(config, worlds=worlds)
    found: dict[str, list[Decision]] = {name: [] for name in chosen}
    for seed in range(nights):
        drawn = draw(config, seed)
        for name, kind in chosen.items():
            found[name].append(night(config, drawn, seed, kind))
    for name, decisions in found.items():
        add_kind(report, config, name, chosen[name], decisions)
    error = float(np.median([decision.figures["standard_error"] for decision in found["equal"]]))
    report.figures["simulated/equal/standard_error"] = Figure(value=error, unit="of the relative NE difference")
    report.figures["simulated/equal/promoted"] = replace(
        report.figures["simulated/equal/promoted"], baseline=promotion_chance(error, 0.0, config.gate)
    )
    report.conditions["simulated"]["gate"] = config.gate.model_dump(mode="json")


def add_kind(report: Report, config: Config, name: str, kind: Kind, decisions: Sequence[Decision]) -> None:
    """Add the share of a kind's nights that were promoted, with its exact interval and what held the others."""
    promoted, nights = sum(decision.promote for decision in decisions), len(decisions)
    goals: dict[str, float] = {}
    if name.startswith("worse"):
        goals = {"at_most": 1 - config.gate.confidence}
    elif name == "equal":
        goals = {"at_least": ENOUGH}
    report.figures[f"simulated/{name}/promoted"] = Figure(value=promoted / nights, unit="of the nights", **goals)
    reasons = [reason.split(":")[0] for decision in decisions if not decision.promote for reason in decision.reasons]
    report.conditions.setdefault("simulated", {"nights": nights})[name] = {
        "errors": {key: asdict(value) for key in Kind.__slots__ if (value := getattr(kind, key)) is not None},
        "mean_difference": float(np.mean([decision.figures["difference"] for decision in decisions])),
        "interval_95": exact_interval(promoted, nights),
        "held_by": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def exact_interval(hits: int, trials: int, confidence: float = 0.95) -> list[float]:
    """Return Clopper and Pearson's interval of a share, both ends by bisection of the binomial tail."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _solve(lambda p: 1 - binomial_below(hits, trials, p), tail, rising=True)
    high = 1.0 if hits == trials else _solve(lambda p: binomial_below(hits + 1, trials, p), tail, rising=False)
    return [low, high]


def binomial_below(hits: int, trials: int, p: float) -> float:
    """Return P(X < hits) of X binomial(trials, p)."""
    if not 0 < p < 1:
        return float(p <= 0 and hits > 0)
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
        for k in range(hits)
    ]
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def _solve(tail: Any, wanted: float, *, rising: bool) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (tail(middle) < wanted) == rising else (low, middle)
    return low
