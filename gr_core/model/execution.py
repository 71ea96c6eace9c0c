"""How the model runs, apart from what it computes: precision, recomputed activations, compiled regions.

The trunk alone is affected. Embeddings, the heads' logits, losses and counts stay fp32 (cases F24, G7).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Chosen by `train.*`; the default is fp32, every activation kept, nothing compiled."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrices and attention of the trunk under autocast; parameters and the residual stream stay fp32."""
    activation_checkpointing: Literal["none", "block"] = "none"
    """block: keep each block's input only and compute the block again in backward, with the same random draws."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context that the trunk runs in."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def run(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        """Run one block of the trunk."""
        if self.activation_checkpointing == "block" and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, x, *rest, use_reentrant=False)
            return out
        direct: Tensor = block(x, *rest)
        return direct


def in_fp32(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a layer in fp32 (fp64 stays) whatever autocast surrounds it."""
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = layer(x if x.dtype == torch.float64 else x.float())
        return out
