"""What runs an operation: a rule on the device, one switch for a run, no silent fallback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gr_core.errors import ConfigError
from gr_core.train.compute import check_kernels, use_kernels
from gr_core.train.settings import TrainConfig
from kernels import choice

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def rule() -> Iterator[None]:
    """Leave the rule as it was."""
    yield
    choice.prefer("auto")


def test_auto_is_the_reference_off_cuda() -> None:
    """Nobody has to say so on a laptop."""
    assert choice.choose("op", "auto", torch.empty(0)) == "reference"


def test_a_runs_switch_is_what_auto_means() -> None:
    """`train.kernels` reaches every operation; what a caller asks for by name stands."""
    use_kernels(TrainConfig(kernels="triton"), CPU)

    assert choice.choose("op", "auto", torch.empty(0)) == "triton"
    assert choice.choose("op", "reference", torch.empty(0)) == "reference"

    use_kernels(TrainConfig(), CPU)
    assert choice.choose("op", "auto", torch.empty(0)) == "reference"


def test_triton_where_it_cannot_run_is_refused_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not interpreted on the CPU: the message says why and what to set, and nothing changes."""
    monkeypatch.setattr(choice, "INTERPRETED", False)

    with pytest.raises(
        ConfigError, match=r"train\.kernels = 'triton' cannot be met: .*are on cpu.*train\.kernels = 'reference'"
    ):
        check_kernels(TrainConfig(kernels="triton"), CPU)
    assert choice.choose("op", "auto", torch.empty(0)) == "reference"


def test_another_word_is_refused() -> None:
    """Config and call alike name the choices."""
    with pytest.raises(ValueError, match=r"train\.kernels must be auto, reference or triton, got 'cuda'"):
        TrainConfig(kernels="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="impl of op must be"):
        choice.choose("op", "cuda", torch.empty(0))  # type: ignore[arg-type]
