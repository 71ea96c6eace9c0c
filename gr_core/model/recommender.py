"""The generative recommender: tokens in, one logit a target and supervised action out.

Dims: `T` tokens, `N` targets, `D` width, `U` distinct rows of the batch, `W` supervised actions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gr_core.model.blocks import Block, rope_angles, time_angles
from gr_core.model.execution import Execution
from gr_core.model.heads import HEADS, Context
from gr_core.model.hstu import HstuBlock
from gr_core.model.inputs import NUM_GAPS, Inputs
from gr_core.model.settings import ModelConfig
from kernels.embedding import fused_lookup

_BLOCKS: dict[str, type[Block] | type[HstuBlock]] = {"softmax": Block, "hstu": HstuBlock}


class Recommender(nn.Module):
    """Dense part of the model; the tables' rows come in as values.

    Args:
        config: Shape of the model.
        num_actions: All actions, supervised or not: history tells them all.
        num_supervised: W.
    """

    def __init__(self, config: ModelConfig, num_actions: int, num_supervised: int) -> None:
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.execution = Execution()
        self.states = nn.Linear(3 * num_actions + 1, config.width, bias=False)
        self.gap = nn.Embedding(NUM_GAPS, config.width) if config.time == "gaps" else None
        block = _BLOCKS[config.block]
        self.blocks = nn.ModuleList(block(config, top=i == config.num_layers - 1) for i in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.context = Context(config)
        self.head = HEADS[config.head](config, num_supervised)
        if self.gap is not None:
            nn.init.normal_(self.gap.weight, std=0.02)
        nn.init.normal_(self.states.weight, std=0.02)

    def forward(self, values_UD: Tensor, inputs: Inputs) -> Tensor:
        """Return logits, [N, W] fp32.

        Args:
            values_UD: The batch's distinct rows, [U, D]; gradients arrive there with duplicates merged.
            inputs: The batch, with at least one target.
        """
        item_TD = fused_lookup(values_UD, inputs.item_places)
        x = item_TD + self.states(inputs.states)
        if self.gap is not None:
            x = x + self.gap(inputs.gaps)
        angles = self._angles(inputs)
        with self.execution.autocast(x.device):
            for block in self.blocks:
                x = self.execution.run(block, x, inputs.plan, inputs.targets, angles)
        item_ND = item_TD.index_select(0, inputs.targets)
        logits: Tensor = self.head(self.norm(x), item_ND, self.context(values_UD, inputs), inputs.counts)
        return logits

    def _angles(self, inputs: Inputs) -> Tensor:
        """Return RoPE's rotations by position, [T, 1, K / 2]; with times, these turn the last half of the pairs."""
        if inputs.times is None:
            return rope_angles(inputs.positions, self.head_dim)
        by_time = time_angles(inputs.times, self.head_dim)
        return torch.cat([rope_angles(inputs.positions, self.head_dim - 2 * by_time.shape[-1]), by_time], dim=-1)


def new_recommender(config: ModelConfig, num_actions: int, num_supervised: int, seed: int) -> Recommender:
    """Return a model whose initial weights follow from the seed alone; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recommender(config, num_actions, num_supervised)
