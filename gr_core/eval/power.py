"""The gate's power: how likely a night's challenger passes, before it is trained. Pure.

The gate promotes when the upper end of the one-sided interval of d = NE(challenger) / NE(champion) - 1 lies below the
margin. With a standard error se of d, normal approximation, z the quantile of the confidence:

    P(promoted | true difference D) = Phi((margin - D) / se - z)

so an equal challenger (D = 0) passes with Phi(margin / se - z), one worse by the margin with 1 - confidence. Users are
drawn whole and are independent, so se = C / sqrt(n), n holdout users counted once a day. Until nights of one's own
exist, C = 0.13: the geometric middle of what docs/checks.md tells (two smoothed-count models one day apart, click, about two
events a user and day; 2 % to 100 % of the users give 0.09 to 0.18). After that C is what the gate's own paired bootstrap
measured: the median of se * sqrt(users) over the last nights.
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
ENOUGH = 0.8  # chance of promotion that an equal challenger should have (case G10)
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


def measured_spread(figures: Sequence[Mapping[str, Any]], *, last: int = 7) -> float | None:
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
