"""Metrics while training: fused, naive and none behind one interface."""

import pytest
import torch

from gr_core.eval.metrics import auc
from gr_core.train.running_metrics import Gathered, new_metrics
from kernels.bucketed_auc import BucketedAUC

CPU = torch.device("cpu")


def rows(seed: int, count: int = 3000):
    """Return logits, labels and known of two actions, the second one rarely known."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.rand(count, 2, generator=draw) < torch.tensor([0.3, 0.05])
    logits = torch.randn(count, 2, generator=draw) + 1.5 * labels - 1
    known = torch.rand(count, 2, generator=draw) < torch.tensor([0.9, 0.2])
    return logits, labels, known


def test_fused_and_naive_auc_agree_within_their_certificates():
    """Each is off the exact AUC by its certificate at most, so they are off each other by the sum; NE is the same."""
    fused, naive = (new_metrics(kind, 2, CPU) for kind in ("fused", "naive"))
    parts = [rows(seed) for seed in range(3)]
    for part in parts:
        fused.update(*part)
        naive.update(*part)
    logits, labels, known = (torch.cat(column) for column in zip(*parts, strict=True))

    for action, (one, two) in enumerate(zip(fused.compute(), naive.compute(), strict=True)):
        seen = known[:, action]
        exact = auc(labels[seen, action].numpy(), logits[seen, action].numpy())
        assert abs(one.auc - exact) <= one.certificate < 0.01
        assert abs(two.auc - exact) <= two.certificate < 0.01
        assert abs(one.auc - two.auc) <= one.certificate + two.certificate
        assert (one.ne, one.calibration, one.count) == (two.ne, two.calibration, two.count)
        assert one.count == int(seen.sum())


@pytest.mark.parametrize("kind", ["fused", "naive", "off"])
def test_counts_go_on_from_a_state(kind):
    """State taken over by another object and rows added there: as all rows in one."""
    whole, first, second = (new_metrics(kind, 2, CPU) for _ in range(3))
    whole.update(*rows(0))
    whole.update(*rows(1))
    first.update(*rows(0))
    second.load({name: sums.clone() for name, sums in first.state().items()})
    second.update(*rows(1))

    assert second.compute() == whole.compute()


def test_on_the_cpu_rows_of_several_steps_are_counted_at_once():
    """Rows wait until there are many, a state or the metrics are asked for, or another state replaces them."""
    counted = []

    class Counting(BucketedAUC):
        def add_counts(self, logits, *others):
            counted.append(len(logits))
            super().add_counts(logits, *others)

    metrics = Gathered(Counting(2))
    for seed in range(6):
        metrics.update(*rows(seed))
    assert counted == [18_000]
    metrics.update(*rows(6))
    assert int(metrics.state()["positives_AB"].sum() + metrics.state()["negatives_AB"].sum()) == sum(
        int(rows(seed)[2].sum()) for seed in range(7)
    )
    assert counted == [18_000, 3_000]

    metrics.update(*rows(7))
    metrics.load({name: torch.zeros_like(sums) for name, sums in BucketedAUC(2).state().items()})
    assert [m.count for m in metrics.compute()] == [0, 0]
    assert counted == [18_000, 3_000]


def test_off_tells_nothing():
    """No metric is made up: all None, with a count of 0."""
    metrics = new_metrics("off", 2, CPU)
    metrics.update(*rows(0))

    assert [(m.auc, m.certificate, m.ne, m.calibration, m.count) for m in metrics.compute()] == [(None,) * 4 + (0,)] * 2
