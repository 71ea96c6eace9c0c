"""Settings of training: a plain frozen dataclass (see gr_core.model.settings for why)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a night trains. May change from night to night; the difference is logged."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    dense_learning_rate: float = 1e-3
    """Peak learning rate of AdamW on dense parameters."""
    sparse_learning_rate: float = 0.05
    """Peak learning rate of rowwise Adagrad on embedding rows."""
    initial_accumulator: float = 0.0
    """Rowwise Adagrad's state of a row without history: the larger, the smaller a row's first steps."""
    beta2: float = 0.99
    """AdamW's decay of squared gradients: a night has few steps, so it must forget faster than 0.999."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay (dense matrices only)."""
    warmup_fraction: float = 0.1
    """Share of the night's steps over which both learning rates rise from 0 to their peak."""
    final_fraction: float = 0.1
    """Learning rate at the night's last step over its peak (cosine decay); 1 keeps it constant."""
    clip_norm: float = 1.0
    """Largest gradient norm of the dense parameters; 0 disables clipping."""
    normalize: Literal["token", "segment", "event_weight"] = "token"
    """What the loss is divided by: see examples 6."""
    micro_batches: int = 1
    """Batches accumulated into one optimizer step."""
    action_weights: dict[str, float] = field(default_factory=dict)
    """Loss weight of each supervised action; 1 where not named."""
    num_threads: int = 2
    """CPU threads of the training process; part of what makes a digest repeatable."""

    def __post_init__(self) -> None:
        """Check ranges; ValueError names the key, the rule and the value."""
        for name in ("dense_learning_rate", "sparse_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} must be a finite number above 0, got {getattr(self, name)}")
        for name in ("warmup_fraction", "final_fraction", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("weight_decay", "clip_norm", "initial_accumulator"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} must be a finite number, at least 0, got {getattr(self, name)}")
        for name in ("micro_batches", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        for action, weight in self.action_weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"train.action_weights.{action} must be a finite number, at least 0, got {weight}")
