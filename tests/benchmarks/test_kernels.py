"""The kernels' benchmark: right first, one object on stdout, no times of the interpreter, and honest work counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import _kernel_attention, _kernel_auc, kernels
from benchmarks._figures import Report
from benchmarks._kernel_timing import Machine, error
from kernels.bucketed_auc import BucketedAUC


def test_on_the_cpu_it_prints_one_object_with_correctness_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The interpreter's times say nothing about a device, so none is printed; counts are equal."""
    assert kernels.main(["--quick", "--only", "auc", "--device", "cpu"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert set(printed["figures"]) == {
        f"auc/{n}/{w}" for n in ("random", "skewed") for w in ("wrong_counts", "sums_error")
    }
    assert all(figure["goal"] is not None for figure in printed["figures"].values())
    assert printed["conditions"]["interpreted"] is True


def test_a_wrong_kernel_misses_its_goal_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed of a wrong answer is no figure."""
    plain = BucketedAUC.update

    def off_by_one(self: BucketedAUC, *batch: Tensor) -> None:
        plain(self, *batch)
        if self._impl == "triton":
            self.positives_AB[0, 0] += 1

    monkeypatch.setattr(BucketedAUC, "update", off_by_one)
    report = Report()
    _kernel_auc.measure_auc(report, Machine.of(torch.device("cpu"), quick=True))

    assert report.missed() == ["auc/random/wrong_counts", "auc/skewed/wrong_counts"]
    assert not any("microseconds" in name for name in report.figures)


def test_pairs_are_those_of_the_layout() -> None:
    """FLOPs are counted on pairs that attend: a window of two over four history tokens, then one target."""
    layout = _kernel_attention.lay_out([5], window=2, targets=1)

    assert layout.lo.tolist() == [0, 0, 0, 1, 2]
    assert layout.hi.tolist() == [0, 1, 2, 3, 4]
    assert layout.targets.tolist() == [4]
    work = _kernel_attention.work_of(Machine.of(torch.device("cpu"), quick=True), layout, torch.float32)
    assert work.pairs == np.sum(layout.hi - layout.lo) + 5


def test_an_error_is_relative_to_the_largest_value_and_nan_is_seen() -> None:
    """A NaN is an error above every goal's reach."""
    assert error(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 10.0])) == pytest.approx(0.1)
    assert not error(torch.tensor([float("nan")]), torch.tensor([1.0])) <= 1.0
