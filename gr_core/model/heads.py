"""Heads: what the trunk, the target's own item, its context and its history counts say about each action.

Dims: `N` targets, `D` width, `W` supervised actions, `C` context features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gr_core.model.inputs import Inputs, count_features
from gr_core.model.settings import ModelConfig
from kernels.embedding import fused_lookup


class Context(nn.Module):
    """What is known of a target beside its item and history: context features, hour of day, day of week; [N, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.time_of_day = config.time_of_day
        if config.time_of_day:
            self.hour = nn.Embedding(24, config.width)
            self.weekday = nn.Embedding(7, config.width)
            nn.init.normal_(self.hour.weight, std=0.02)
            nn.init.normal_(self.weekday.weight, std=0.02)

    def forward(self, values_UD: Tensor, inputs: Inputs) -> Tensor:
        """Sum the context's embeddings."""
        context_ND = fused_lookup(values_UD, inputs.context_places)
        if self.time_of_day:
            context_ND = context_ND + self.hour(inputs.hours) + self.weekday(inputs.weekdays)
        return context_ND


class SharedBottom(nn.Module):
    """One hidden layer shared by all actions, then one logit an action."""

    def __init__(self, config: ModelConfig, num_supervised: int) -> None:
        super().__init__()
        num_inputs = 3 * config.width + count_features(config, num_supervised)
        self.bottom = nn.Linear(num_inputs, 2 * config.width)
        self.logits = nn.Linear(2 * config.width, num_supervised)

    def forward(self, trunk_ND: Tensor, item_ND: Tensor, context_ND: Tensor, counts_NK: Tensor) -> Tensor:
        """Return logits, [N, W], fp32 or better also under autocast."""
        hidden = nn.functional.silu(self.bottom(torch.cat([trunk_ND, item_ND, context_ND, counts_NK], dim=1)))
        logits: Tensor = self.logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()
