"""Which attention path runs, and why: from the config, the model, the pack and the device; never silent."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import attention as torch_attention

from gr_core.errors import ConfigError
from gr_core.model.attention.bucketed import bucketed_planner
from gr_core.model.attention.dense import plan_dense
from gr_core.model.attention.plan import Planner
from gr_core.model.settings import AttentionConfig, ModelConfig
from kernels.choice import INTERPRETED

_LARGEST_FLASH_HEAD = 256
_LARGEST_INTERVAL_HEAD = 128
_SMALLEST_FLEX_HEAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What decides which paths can run."""

    model: ModelConfig
    device: torch.device
    pack_layout: str
    """pack.layout: packed or padded."""
    time_window: bool
    """Whether the pack has a time window, as far as is known."""
    token_budget: int
    """Tokens that a batch may hold."""
    half_precision: bool
    """Whether queries, keys and values come in half precision."""

    @property
    def head_dim(self) -> int:
        """K."""
        return self.model.width // self.model.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenAttention:
    """The path of a run."""

    kernel: str
    """What really runs: bucketed, flex, varlen+flex, fa3+flex, interval or dense."""
    reason: str
    """Why this one, for the log."""
    planner: Planner


def choose_attention(config: AttentionConfig, given: Circumstances) -> ChosenAttention:
    """Choose the attention path.

    Args:
        config: The run's `attention`.
        given: Model, pack and device.

    Returns:
        The kernel that will run, the reason, and what lays batches out for it.

    Raises:
        ConfigError: attention.path or attention.require names a path that cannot run here; says why and what to set.
    """
    if config.require != "none":
        if config.require == "fa3" and given.device.type != "cuda":
            _refuse("require", "fa3", f"FlashAttention 3 runs on Hopper (compute capability 9), not on {given.device}")
        path = "varlen" if config.require == "fa3" else config.require
        _refuse("require", config.require, _why_not(path, given))
        if config.require == "fa3":
            _refuse("require", "fa3", _activate_fa3())
        return _chosen(path, given, "attention.require", fa3=config.require == "fa3")
    if config.path != "auto":
        _refuse("path", config.path, _why_not(config.path, given))
        return _chosen(config.path, given, "attention.path")
    best, reason = _best(given)
    return _chosen(best, given, reason)


def _best(given: Circumstances) -> tuple[str, str]:
    """Return the path of `auto` and why it is that one."""
    if given.device.type != "cuda":
        return "bucketed", f"the device is {given.device.type}"
    no_flex, no_varlen = _why_not("flex", given), _why_not("varlen", given)
    if no_flex is not None:
        no_interval = _why_not("interval", given)
        return ("interval", no_flex) if no_interval is None else ("bucketed", f"{no_flex}; {no_interval}")
    if no_varlen is not None:
        return "flex", no_varlen
    if given.time_window:
        return "flex", "a time window leaves few tokens plainly causal"
    return "varlen", "without a time window most tokens are plainly causal"


def _chosen(path: str, given: Circumstances, reason: str, *, fa3: bool = False) -> ChosenAttention:
    kernels = {"varlen": "fa3+flex" if fa3 else "varlen+flex"}
    return ChosenAttention(kernel=kernels.get(path, path), reason=reason, planner=_planner(path, given))


def _planner(path: str, given: Circumstances) -> Planner:
    if path == "bucketed":
        return bucketed_planner(given.pack_layout)
    if path == "dense":
        return plan_dense
    if path == "interval":
        from gr_core.model.attention.interval import plan_interval

        return plan_interval
    # imported here: FlexAttention brings the compiler, two seconds that other paths need not wait
    from gr_core.model.attention.flex import plan_flex
    from gr_core.model.attention.varlen import plan_varlen

    return partial(plan_flex if path == "flex" else plan_varlen, token_budget=given.token_budget)


def _why_not(path: str, given: Circumstances) -> str | None:
    """Return why a path cannot run here; None: it can."""
    checks = {"flex": _flex_checks, "varlen": _varlen_checks, "interval": _interval_checks}
    found = checks[path](given) if path in checks else []
    return next((reason for failed, reason in found if failed), None)


def _flex_checks(given: Circumstances) -> list[tuple[bool, str]]:
    return [
        (given.model.block == "hstu", "FlexAttention weighs by softmax, model.block = 'hstu' by SiLU"),
        (given.device.type != "cuda", f"FlexAttention has no backward on {given.device.type}"),
        (given.pack_layout == "padded", "pack.layout = 'padded' pads attention, which FlexAttention does not"),
        (
            given.head_dim < _SMALLEST_FLEX_HEAD,
            f"FlexAttention needs model.width / model.num_heads of at least {_SMALLEST_FLEX_HEAD}, got {given.head_dim}",
        ),
    ]


def _varlen_checks(given: Circumstances) -> list[tuple[bool, str]]:
    return [
        *_flex_checks(given),  # what is not plainly causal goes through FlexAttention
        (
            importlib.util.find_spec("torch.nn.attention.varlen") is None,
            f"torch {torch.__version__} has no varlen_attn",
        ),
        (given.model.time_half_life_days is not None, "FlashAttention takes no bias, model.time_half_life_days is one"),
        (not given.half_precision, "FlashAttention needs half precision: train.precision = 'bf16'"),
        (
            given.head_dim % 8 != 0 or given.head_dim > _LARGEST_FLASH_HEAD,
            "FlashAttention needs model.width / model.num_heads to be a multiple of 8, at most "
            f"{_LARGEST_FLASH_HEAD}, got {given.head_dim}",
        ),
    ]


def _interval_checks(given: Circumstances) -> list[tuple[bool, str]]:
    return [
        (importlib.util.find_spec("triton") is None, "Triton is not installed: pip install triton"),
        (
            given.device.type != "cuda" and not INTERPRETED,
            f"the interval kernels run on CUDA, not on {given.device.type} (TRITON_INTERPRET=1 interprets them, for tests)",
        ),
        (given.pack_layout == "padded", "pack.layout = 'padded' pads attention, which the interval kernels do not"),
        (
            given.head_dim > _LARGEST_INTERVAL_HEAD,
            f"the interval kernels take model.width / model.num_heads up to {_LARGEST_INTERVAL_HEAD}, got {given.head_dim}",
        ),
    ]


def _activate_fa3() -> str | None:
    """Make FlashAttention 3 the kernel behind `varlen_attn`; return why that fails, None where it does not."""
    if torch.cuda.get_device_capability()[0] != 9:
        return f"FlashAttention 3 runs on Hopper (compute capability 9), this is a {torch.cuda.get_device_name()}"
    activate: Any = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None:
        return f"torch {torch.__version__} cannot activate FlashAttention 3"
    try:
        activate("FA3")
    except Exception as error:  # noqa: BLE001 -- whatever the package raises, it does not run
        return f"FlashAttention 3 cannot be activated: {error}"
    return None


def _refuse(key: str, value: str, reason: str | None) -> None:
    if reason is not None:
        remedy = "set attention.require = 'none'" if key == "require" else "set attention.path = 'auto'"
        raise ConfigError(f"attention.{key} = {value!r} cannot be met: {reason}; {remedy}", where=f"attention.{key}")
