"""How the model runs, apart from what it computes: precision, recomputed activations, compiled regions.

The trunk alone is affected. Embeddings, heads, logits, losses and counts stay fp32 (cases F24, G7).

Compiled are the two regions of a block around attention, `project` and `finish`: their shapes are the batch's token and
target counts, and those are symbols in the graph, so that one graph serves every batch (case F18) without padding to the
token budget. Attention, whose shapes follow from segment lengths, stays as it is. Blocks share graphs: middle blocks'
`project`, the top block's, and `finish` are three in all, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gr_core.errors import ConfigError

BACKEND = "inductor"
_FEWEST_ROWS = 2  # torch makes dimensions of 0 and 1 constants: such a batch would be a graph of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Chosen by `train.*`; the default is fp32, every activation kept, nothing compiled."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrices and attention of the trunk under autocast; parameters and the residual stream stay fp32."""
    activation_checkpointing: Literal["none", "block"] = "none"
    """block: keep each block's input only and compute the block again in backward, with the same random draws."""
    compile: Literal["off", "blocks"] = "off"
    """blocks: torch.compile for what surrounds attention in each block."""

    def apply(self, model: Any) -> None:
        """Make a model run like this; its parameters and their names stay as they are.

        Args:
            model: A gr_core.model.recommender.Recommender.

        Raises:
            ConfigError: There is no compiler to compile with.
        """
        regions: Callable[[Any], tuple[Any, Any]] = _compiled if self.compile == "blocks" else _plain
        if self.compile == "blocks":
            check_compiler(next(model.parameters()).device)
        for block in model.blocks:
            block.regions = regions(type(block))
        model.execution = self

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


PLAIN = Execution()


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where the tools are missing, before anything has begun.

    Raises:
        ConfigError: No C++ compiler (CPU), or no Triton (CUDA).
    """
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "train.compile = 'blocks' needs Triton on CUDA, which is not installed; pip install triton, or set "
                "train.compile = 'off'",
                where="train.compile",
            )
        return
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        wanted = [name for name in config.cpp.cxx if name]
        raise ConfigError(
            f"train.compile = 'blocks' needs a C++ compiler on the CPU, and {' or '.join(wanted)} does not run; install "
            "g++, name another one in CXX, or set train.compile = 'off'",
            where="train.compile",
        ) from error


def graphs() -> dict[str, int]:
    """Return what torch.compile has done in this process: graphs, and compiled kernels that its disk cache had or lacked."""
    from torch._dynamo.utils import counters

    found = {f"cache_{what}": int(counters["inductor"].get(f"fxgraph_cache_{what}", 0)) for what in ("hit", "miss")}
    return {"graphs": int(counters["stats"].get("unique_graphs", 0)), **found}


def _plain(kind: Any) -> tuple[Any, Any]:
    return kind.project, kind.finish


@cache
def _compiled(kind: Any) -> tuple[Any, Any]:
    """Return a kind of block's regions compiled; one pair a process, so that all blocks share its graphs."""
    return _region(kind.project), _region(kind.finish)


def _region(plain: Any) -> Any:
    fast: Any = torch.compile(plain, dynamic=True, fullgraph=True, backend=BACKEND)

    def run(block: nn.Module, *tensors: Tensor) -> Any:
        is_small = any(tensor.shape[0] < _FEWEST_ROWS for tensor in tensors)
        return plain(block, *tensors) if is_small else fast(block, *tensors)

    return run
