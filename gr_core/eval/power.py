"""The gate's power: how likely a night's challenger passes, before it is trained. Pure.

The gate promotes when the upper end of the one-sided interval of d = NE(challenger) / NE(champion) - 1 lies below the
margin. With a standard error se of d, normal approximation, z the quantile of the confidence:

    P(promoted | true difference D) = Phi((margin - D) / se - z)

so an equal challenger (D = 0) passes with Phi(margin / se - z), one worse by the margin with 1 - confidence. Users are
drawn whole and are independent, so se = C / sqrt(n), n holdout users counted once a day. Until nights of one's own
exist, C = 0.13: the geometric middle of what docs/checks.md tells (two smoothed-count models one day apart, click, about two
events a user and day; 2 % to 100 % of the users give 0.09 to 0.18). After that C is what the gate's own paired bootstrap
measured: the median of se * sqrt(users) over the last nights. Few of them, since models that are young differ more: of
the embedded world C falls from 0.15 on its second night to 0.06 on its fifth. Young models also get better each night, so
a gate that would hold an equal challenger promotes theirs: `measured_difference` says how much better they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, median
from typing import Any

from gr_core.config import GateConfig
from gr_core.eval.gate import promotion_chance

SPREAD = 0.13  # C: standard error of the relative NE difference at one user
SPREADS = (0.09, 0.18)  # between which C lay
ENOUGH = 0.8  # chance of promotion that an equal challenger should have (case G10)
LAST = 3  # comparisons that are looked at
_MAX_NIGHTS = 366


@dataclass(frozen=True, kw_only=True)
class GatePower:
    """What a gate of these settings can tell."""

    nights: int
    """Nights whose holdout events are judged."""
    users: int
    """Holdout users of those nights, one that comes on two nights counted twice."""
    standard_error: float | None
    """Of the relative NE difference; None without users."""
    promoted_if_equal: float
    """Chance that an equal challenger is promoted."""
    promoted_if_worse: float
    """Chance that one worse by the margin is promoted."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def measured_spread(figures: Sequence[Mapping[str, Any]], *, last: int = LAST) -> float | None:
    """Return C as the gate measured it.

    Args:
        figures: The gate's figures of past nights, oldest first; nights without a comparison count for nothing.
        last: Newest nights that are looked at.

    Returns:
        The median of se * sqrt(users); None where no night compared two models.
    """
    told = [(f.get("standard_error"), f.get("users")) for f in figures]
    spreads = [float(se) * math.sqrt(users) for se, users in told if se is not None and se > 0 and users]
    return median(spreads[-last:]) if spreads else None


def measured_difference(figures: Sequence[Mapping[str, Any]], *, last: int = LAST) -> float | None:
    """Return by how much past challengers differed from their champions: the median relative NE difference, negative: better.

    Args:
        figures: As `measured_spread`.
        last: Newest comparisons that are looked at.
    """
    told = [float(one["difference"]) for one in figures if one.get("difference") is not None]
    return median(told[-last:]) if told else None


def gate_power(users_a_night: float, config: GateConfig, spread: float | None = None) -> GatePower:
    """Work out the power of the gate.

    Args:
        users_a_night: Holdout users of one night.
        config: Nights, margin and confidence.
        spread: C, where measured; None: SPREAD.

    Returns:
        The power; without users nothing is ever promoted by comparison.
    """
    users = round(users_a_night * config.nights)
    if users < 1:
        return GatePower(
            nights=config.nights, users=0, standard_error=None, promoted_if_equal=0.0, promoted_if_worse=0.0
        )
    error = (SPREAD if spread is None else spread) / math.sqrt(users)
    return GatePower(
        nights=config.nights,
        users=users,
        standard_error=error,
        promoted_if_equal=promotion_chance(error, 0.0, config),
        promoted_if_worse=promotion_chance(error, config.margin, config),
    )


def nights_needed(
    users_a_night: float, config: GateConfig, spread: float | None = None, *, wanted: float = ENOUGH
) -> int | None:
    """Return the fewest nights with which an equal challenger is promoted with the wanted chance.

    Solves Phi(margin * sqrt(users_a_night * K) / C - z) >= wanted for K; None where no year of nights is enough.
    """
    if users_a_night <= 0 or config.margin <= 0:
        return None
    normal = NormalDist()
    root = (normal.inv_cdf(wanted) + normal.inv_cdf(config.confidence)) * (SPREAD if spread is None else spread)
    nights = max(1, math.ceil((root / config.margin) ** 2 / users_a_night - 1e-9))
    return nights if nights <= _MAX_NIGHTS else None


def outlook(
    users_a_night: float, config: GateConfig, spread: float | None, difference: float | None
) -> tuple[str, str]:
    """Say what the gate will do: a warning where the challengers to come are likely to be held though they are equal.

    Args:
        users_a_night: Holdout users of one night.
        config: Nights, margin and confidence.
        spread: C as past gates measured it; None: there was none, so C is somewhere in SPREADS.
        difference: The relative NE difference of past challengers; None: unknown.

    Returns:
        Level (info or warning), and the sentence with the chance and the nights that it takes.
    """
    gate, needed = gate_power(users_a_night, config, spread), nights_needed(users_a_night, config, spread)
    enough = "no number of nights" if needed is None else f"gate.nights = {needed}"
    low, high = (gate_power(users_a_night, config, one).promoted_if_equal for one in reversed(SPREADS))
    rule = f"by a rule of thumb: {low:.2f} to {high:.2f}; past gates will tell"
    told = (
        f"with {gate.users} holdout users in {gate.nights} nights an equal challenger is promoted with chance "
        f"{gate.promoted_if_equal:.2f} ({rule if spread is None else 'as past gates measured'}); {enough} would reach "
        f"{ENOUGH:.0%}"
    )
    likely = high if spread is None else gate.promoted_if_equal
    if likely < ENOUGH and difference is not None and difference < 0 and gate.standard_error is not None:
        likely = promotion_chance(gate.standard_error, difference, config)
        told += (
            f"; the last challengers were better than their champions by {-difference:.1%}, and one like them is promoted "
            f"with chance {likely:.2f}: equal ones come when a night no longer teaches so much"
        )
    if likely >= ENOUGH:
        return "info", told
    return "warning", f"{told}; a larger lake.holdout_fraction (of a new home) does, too"
