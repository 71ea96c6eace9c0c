"""The kernels on a CUDA device: what the interpreter cannot see (races, alignment, the compiler's own code)."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import PARTS, measure_kernels


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right_on_the_device(part: str) -> None:
    """Values, gradients and counts against the reference, as `python -m benchmarks.kernels` checks before it times."""
    report = measure_kernels(torch.device("cuda"), [part], quick=True)

    assert any(figure.goal is not None for figure in report.figures.values())
    assert report.missed() == []
