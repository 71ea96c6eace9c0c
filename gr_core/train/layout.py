"""How a training is spread over processes: a plain frozen dataclass, `train.distributed` in the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedConfig:
    """Ranks of a training and what each of them holds. The number of ranks changes no result beyond rounding."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    strategy: Literal["none", "ddp", "hsdp"] = "none"
    """none: one process. ddp: every rank holds the whole model, gradients are summed. hsdp: dense parameters (FSDP2) and
    table rows are sharded over `shard` ranks, best those of a machine, and that is repeated `replicate` times."""
    replicate: int = 1
    """Copies of the model: ranks under ddp, groups of `shard` ranks under hsdp; 1 there is plain FSDP."""
    shard: int = 1
    """Ranks that one copy is spread over; always 1 under ddp."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries tensors between ranks; auto: nccl on CUDA, gloo on CPU."""

    def __post_init__(self) -> None:
        """Check the rules between fields; ValueError names the key, the rule and the value."""
        for name in ("replicate", "shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.distributed.{name} must be at least 1, got {getattr(self, name)}")
        if self.strategy == "none" and self.ranks > 1:
            raise ValueError(
                f"train.distributed.strategy must be ddp or hsdp for {self.replicate} x {self.shard} ranks, got 'none'; "
                "name one, or leave replicate and shard at 1"
            )
        if self.strategy == "ddp" and self.shard > 1:
            raise ValueError(
                f"train.distributed.shard must be 1 under ddp, got {self.shard}; set replicate, or strategy = hsdp"
            )

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.replicate * self.shard
