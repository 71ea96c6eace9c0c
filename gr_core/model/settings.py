"""Settings of the model: a plain frozen dataclass, so that training needs no pydantic.

`gr_core.config` validates it at the edge (`__pydantic_config__` is a plain dict that pydantic reads);
`python -m gr_core.train` builds it straight from RUN.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

Block = Literal["softmax", "hstu"]
Head = Literal["shared_bottom", "mmoe"]
Time = Literal["gaps", "rope"]
Path = Literal["auto", "bucketed", "flex", "varlen", "interval", "dense"]
Kernel = Literal["none", "bucketed", "flex", "varlen", "interval", "dense", "fa3"]
_SHORTEST_HALF_LIFE_DAYS = 1 / 24  # with shorter ones fp32 cannot tell the ages of a year's history apart


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
    block: Block = "softmax"
    """softmax: RoPE, softmax attention, SwiGLU; hstu: pointwise SiLU attention with position and time bias, gated, without
    a feed-forward (arXiv 2402.17152)."""
    hstu_divisor: float = 128.0
    """What HSTU's weights are divided by, whatever the history's length; sequences.max_history is a good value."""
    time: Time = "gaps"
    """gaps: log-bucketed time since the token before, as an embedding; rope: half of RoPE's pairs turn with the time
    instead of the position, periods from a minute to a year (softmax blocks only)."""
    time_half_life_days: float | None = None
    """The attention weight of a key halves for each such age against its query (softmax blocks only); unset: no decay."""
    head: Head = "shared_bottom"
    """shared_bottom: one hidden layer for all actions; mmoe: experts, mixed for each action by a gate of its own."""
    num_experts: int = 4
    """Experts of the mmoe head, each as wide as the shared bottom."""

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
        self._check_kinds()

    def _check_kinds(self) -> None:
        for name, kind in (("block", Block), ("head", Head), ("time", Time)):
            _check_literal(f"model.{name}", kind, getattr(self, name))
        if not 0 < self.hstu_divisor < math.inf:
            raise ValueError(f"model.hstu_divisor must be a finite number above 0, got {self.hstu_divisor}")
        if self.num_experts < 1:
            raise ValueError(f"model.num_experts must be at least 1, got {self.num_experts}")
        half_life = self.time_half_life_days
        if half_life is not None and not _SHORTEST_HALF_LIFE_DAYS <= half_life < math.inf:
            raise ValueError(f"model.time_half_life_days must be finite and at least 1 hour (1 / 24), got {half_life}")
        if self.block == "hstu" and (self.time == "rope" or half_life is not None):
            raise ValueError(
                f"model.block = 'hstu' has a time bias of its own, got model.time = {self.time!r} and "
                f"model.time_half_life_days = {half_life}; set 'gaps' and leave the half-life unset, or use 'softmax'"
            )
        if self.time == "rope" and self.width // self.num_heads < 4:
            raise ValueError(
                "model.time = 'rope' needs two pairs a head, so model.width at least 4 * model.num_heads, got "
                f"{self.width} and {self.num_heads}"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """All feature names in table order: item features, then context features."""
        return self.item_features + self.context_features


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Which attention path runs; which one did is logged and stands in the checkpoint's state.json."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    path: Path = "auto"
    """auto: bucketed on the CPU, on CUDA varlen where it serves most tokens and else flex, interval for HSTU; bucketed:
    length-bucketed SDPA; flex: FlexAttention over intervals; varlen: FlashAttention on plainly causal runs, FlexAttention
    on the rest; interval: our Triton kernels; dense: the reference, for tests and small packs."""
    require: Kernel = "none"
    """Fail by name, before anything trains, where this path cannot run (fa3: varlen by FlashAttention 3); none: any."""

    def __post_init__(self) -> None:
        """Check the values and that they agree; ValueError names the key, the rule and the value."""
        _check_literal("attention.path", Path, self.path)
        _check_literal("attention.require", Kernel, self.require)
        needed = "varlen" if self.require == "fa3" else self.require
        if self.path != "auto" and needed not in ("none", self.path):
            raise ValueError(
                f"attention.require = {self.require!r} cannot be met by attention.path = {self.path!r}; set the path to "
                f"'auto' or {needed!r}"
            )


def _check_literal(key: str, kind: Any, value: Any) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{key} must be one of {', '.join(get_args(kind))}, got {value!r}")
