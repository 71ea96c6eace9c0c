"""The attention path of a run: chosen from its config, pack and device, and told once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from gr_core.model.attention import ChosenAttention, Circumstances, choose_attention
from gr_core.train.run import Run

logger = logging.getLogger(__name__)


def attention_of(run: Run, index: Mapping[str, Any], device: torch.device) -> ChosenAttention:
    """Choose and log the attention path of a run.

    Args:
        run: Its `attention`, `model` and `train.precision` decide.
        index: The pack's index.
        device: The training device.

    Raises:
        ConfigError: attention.path or attention.require cannot be met; see `choose_attention`.
    """
    pack = run.config.get("pack", {})
    layout = pack.get("layout", index["layout"])  # `daybreak attribute --baseline` pads a packed pack
    chosen = choose_attention(
        run.attention,
        Circumstances(
            model=run.model,
            device=device,
            pack_layout=layout,
            time_window=pack.get("time_window_seconds") is not None,
            token_budget=int(index["token_budget"]),
            half_precision=run.train.precision == "bf16",
        ),
    )
    padded = ", one bucket a batch (pack.layout = padded)" if layout == "padded" else ""
    logger.info("attention path: %s on %s%s; %s", chosen.kernel, device, padded, chosen.reason)
    return chosen
