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


class MixtureOfExperts(nn.Module):
    """MMoE (Ma et al., KDD 2018): experts shared by all actions, mixed for each by a softmax gate, then one logit."""

    def __init__(self, config: ModelConfig, num_supervised: int) -> None:
        super().__init__()
        num_inputs = 3 * config.width + count_features(config, num_supervised)
        self.num_experts = config.num_experts
        self.experts = nn.Linear(num_inputs, config.num_experts * 2 * config.width)
        self.gates = nn.Linear(num_inputs, config.num_experts * num_supervised)
        self.logits = nn.Linear(2 * config.width, num_supervised)

    def forward(self, trunk_ND: Tensor, item_ND: Tensor, context_ND: Tensor, counts_NK: Tensor) -> Tensor:
        """Return logits, [N, W], fp32 or better also under autocast."""
        known = torch.cat([trunk_ND, item_ND, context_ND, counts_NK], dim=1)
        hidden = nn.functional.silu(self.experts(known)).view(len(known), self.num_experts, -1)
        share_NWE = self.gates(known).view(len(known), -1, self.num_experts).softmax(dim=-1)
        # a mix's logit is the mix of its experts' logits: the bias counts once, as the shares add up to one
        logits: Tensor = (share_NWE * self.logits(hidden).transpose(1, 2)).sum(dim=-1)
        return logits if logits.dtype == torch.float64 else logits.float()


HEADS: dict[str, type[SharedBottom] | type[MixtureOfExperts]] = {
    "shared_bottom": SharedBottom,
    "mmoe": MixtureOfExperts,
}
