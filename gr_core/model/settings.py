"""Settings of the model: a plain frozen dataclass, so that training needs no pydantic.

`gr_core.config` validates it at the edge (`__pydantic_config__` is a plain dict that pydantic reads);
`python -m gr_core.train` builds it straight from RUN.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the generative recommender. Must equal the parent's: a change is a full retrain."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    width: int = 64
    """Model dimension D; a multiple of num_heads with an even quotient (RoPE rotates pairs)."""
    num_layers: int = 2
    """Transformer blocks; the last one runs for target tokens only."""
    num_heads: int = 4
    """Attention heads."""
    feedforward_multiple: float = 2.0
    """Hidden width of SwiGLU over the model's width."""
    dropout: float = 0.0
    """Dropout probability after attention and feed-forward, in training only (0-1)."""
    id_drop_fraction: float = 0.02
    """Share of ids replaced by their fallback row in training; this is what trains the fallback rows."""
    item_features: tuple[str, ...] = ("item_id",)
    """Features of history and target tokens: item_id, and side features by name. Each is a table."""
    context_features: tuple[str, ...] = ()
    """Features of target tokens only; they enter after the trunk. Each is a table."""
    time_of_day: bool = True
    """Add the hour of day and the day of week (UTC) of the target as context."""
    history_counts: bool = True
    """Tell the head how often actions were known and taken in the history that a target sees: all of it, its newest
    tokens, and the tokens that share the target's item or another item feature."""

    def __post_init__(self) -> None:
        """Check the rules between fields; ValueError names the key, the rule and the value."""
        if self.num_heads < 1 or self.width % (2 * self.num_heads):
            raise ValueError(
                f"model.width must be a multiple of 2 * model.num_heads, got {self.width} and "
                f"{self.num_heads}; choose for example width = {32 * max(self.num_heads, 1)}"
            )
        if not 0 < self.feedforward_multiple < math.inf:
            raise ValueError(
                f"model.feedforward_multiple must be a finite number above 0, got {self.feedforward_multiple}; "
                "choose for example 2.0"
            )
        if self.num_layers < 1:
            raise ValueError(f"model.num_layers must be at least 1, got {self.num_layers}")
        for name in ("dropout", "id_drop_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be in [0, 1), got {getattr(self, name)}")
        names = self.item_features + self.context_features
        if "item_id" not in self.item_features or len(set(names)) != len(names):
            raise ValueError(
                "model.item_features must contain item_id, and no feature may stand twice, got "
                f"{list(self.item_features)} and context {list(self.context_features)}"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """All feature names in table order: item features, then context features."""
        return self.item_features + self.context_features
