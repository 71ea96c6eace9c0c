"""The five-way split and the counts."""

import time

import pytest
import torch

from gr_core.train.attribution import PARTS, Attribution


def test_seconds_go_to_their_part_and_tokens_are_counted():
    """A part has the time spent in it; unused budget and padding are shares over batches."""
    clock = Attribution(torch.device("cpu"), token_budget=100)
    with clock.part("forward"):
        time.sleep(0.02)
    clock.count(60, 0.1)
    clock.count(100, 0.3)

    metrics = clock.metrics()

    assert metrics["perf/seconds/forward"] >= 0.02
    assert metrics["perf/seconds/backward"] == 0.0
    assert metrics["perf/unused_budget_fraction"] == pytest.approx(0.2)
    assert metrics["perf/padding_fraction"] == pytest.approx(0.2)
    assert metrics["perf/tokens_per_second"] > 0
    assert {f"perf/seconds/{part}" for part in PARTS} <= metrics.keys()


def test_a_night_without_batches_has_no_shares():
    """Nothing counted gives zeros, not a division by zero."""
    metrics = Attribution(torch.device("cpu"), 100).metrics()
    assert (metrics["perf/unused_budget_fraction"], metrics["perf/padding_fraction"]) == (0.0, 0.0)
