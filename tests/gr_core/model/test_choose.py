"""Which attention path is chosen, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gr_core.errors import ConfigError
from gr_core.model.attention import Circumstances, choose_attention
from gr_core.model.settings import AttentionConfig, ModelConfig

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def given(device: torch.device, **changes: Any) -> Circumstances:
    """Return circumstances in which every path of the device can run; keys of the model go to the model."""
    values: dict[str, Any] = {
        "pack_layout": "packed",
        "time_window": False,
        "token_budget": 256,
        "half_precision": True,
    }
    model = {key: changes.pop(key) for key in list(changes) if key not in values}
    return Circumstances(model=ModelConfig(**model), device=device, **{**values, **changes})


AUTO = {
    "cpu": (CPU, {}, "bucketed", "device is cpu"),
    "cuda": (CUDA, {}, "varlen+flex", "plainly causal"),
    "fp32": (CUDA, {"half_precision": False}, "flex", "half precision"),
    "window": (CUDA, {"time_window": True}, "flex", "window"),
    "decay": (CUDA, {"time_half_life_days": 7.0}, "flex", "time_half_life_days"),
    "odd heads": (CUDA, {"width": 72}, "flex", "multiple of 8"),
    "hstu": (CUDA, {"block": "hstu"}, "interval", "SiLU"),
    "hstu, padded": (CUDA, {"block": "hstu", "pack_layout": "padded"}, "bucketed", "interval kernels do not"),
    "hstu, wide heads": (CUDA, {"block": "hstu", "width": 512, "num_heads": 2}, "bucketed", "up to 128, got 256"),
    "padded": (CUDA, {"pack_layout": "padded"}, "bucketed", "padded"),
    "small heads": (CUDA, {"num_heads": 8}, "interval", "at least 16"),
}


@pytest.mark.parametrize(("device", "changes", "kernel", "reason"), AUTO.values(), ids=AUTO.keys())
def test_auto_takes_the_best_path_that_can_run_and_says_why(
    device: torch.device, changes: dict[str, Any], kernel: str, reason: str
) -> None:
    """The kernel follows from device, pack and model, and the reason names what decided."""
    chosen = choose_attention(AttentionConfig(), given(device, **changes))

    assert chosen.kernel == kernel
    assert reason in chosen.reason


UNMET = {
    "flex on the CPU": ({"path": "flex"}, CPU, {}, r"attention.path = 'flex' .* no backward on cpu; .*path = 'auto'"),
    "require flex on the CPU": ({"require": "flex"}, CPU, {}, r"attention.require = 'flex' .*require = 'none'"),
    "varlen on the CPU": ({"path": "varlen"}, CPU, {}, "no backward on cpu"),
    "fa3 on the CPU": ({"require": "fa3"}, CPU, {}, r"attention.require = 'fa3' .*cpu"),
    "flex for hstu": ({"path": "flex"}, CUDA, {"block": "hstu"}, "model.block = 'hstu' by SiLU"),
    "varlen with decay": ({"require": "varlen"}, CUDA, {"time_half_life_days": 1.0}, "takes no bias"),
    "varlen in fp32": ({"path": "varlen"}, CUDA, {"half_precision": False}, "train.precision = 'bf16'"),
}


@pytest.mark.parametrize(("config", "device", "changes", "message"), UNMET.values(), ids=UNMET.keys())
def test_a_path_that_cannot_run_is_refused_by_name(
    config: dict[str, Any], device: torch.device, changes: dict[str, Any], message: str
) -> None:
    """The error says the key, the value, why not, and what to set."""
    with pytest.raises(ConfigError, match=message) as caught:
        choose_attention(AttentionConfig(**config), given(device, **changes))

    assert caught.value.where == f"attention.{next(iter(config))}"


def test_the_interval_path_is_refused_on_the_cpu_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests interpret the kernels; without the interpreter, or without Triton, the error says so."""
    assert choose_attention(AttentionConfig(path="interval"), given(CPU)).kernel == "interval"

    monkeypatch.setattr("gr_core.model.attention.choose.INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"attention.path = 'interval' .*run on CUDA, not on cpu.*path = 'auto'"):
        choose_attention(AttentionConfig(path="interval"), given(CPU))

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"attention.require = 'interval' .*pip install triton"):
        choose_attention(AttentionConfig(require="interval"), given(CUDA))


@pytest.mark.parametrize("name", ["bucketed", "dense"])
def test_a_required_path_is_taken(name: str) -> None:
    """What is required runs, whatever auto would have chosen."""
    required = choose_attention(AttentionConfig(require=name), given(CUDA))
    set_by_path = choose_attention(AttentionConfig(path=name), given(CPU))

    assert required.kernel == set_by_path.kernel == name


def test_fa3_names_the_card_that_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 needs Hopper: another card is named."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")

    with pytest.raises(ConfigError, match=r"compute capability 9.*A100"):
        choose_attention(AttentionConfig(require="fa3"), given(CUDA))


def test_fa3_says_why_its_package_cannot_be_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper without FlashAttention 3's package torch's own words are handed on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    with pytest.raises(
        ConfigError, match=r"attention\.require = 'fa3' cannot be met: FlashAttention 3 cannot be activated"
    ):
        choose_attention(AttentionConfig(require="fa3"), given(CUDA))


def test_a_requirement_that_contradicts_the_path_is_refused() -> None:
    """The settings refuse it by themselves: both keys are named."""
    with pytest.raises(ValueError, match=r"attention.require = 'fa3' cannot be met by attention.path = 'bucketed'"):
        AttentionConfig(path="bucketed", require="fa3")
    with pytest.raises(ValueError, match=r"attention\.path must be one of auto, bucketed"):
        AttentionConfig(path="flash")
