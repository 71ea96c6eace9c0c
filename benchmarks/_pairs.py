"""Pairs in one run, interleaved in time: a round trains a little with every arm, so that a slow minute hits them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

ROUNDS = 5


def interleave(arms: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Run every arm once to warm up, then `rounds` times in turn.

    Args:
        arms: Work by name; it returns how much it did.
        rounds: How often each is measured.

    Returns:
        By arm, how much a second in each round.
    """
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, work in arms.items():
            began = time.perf_counter()
            amount = work()
            if number:
                rates[name].append(amount / (time.perf_counter() - began))
    return rates


def medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each arm's median rate."""
    return {name: median(values) for name, values in rates.items()}


def ratio(rates: Mapping[str, list[float]], arm: str, rival: str) -> float:
    """Return the median over rounds of the rate of `arm` over that of `rival` in the same round."""
    return median(ours / theirs for ours, theirs in zip(rates[arm], rates[rival], strict=True))
