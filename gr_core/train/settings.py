"""Settings of training: a plain frozen dataclass (see gr_core.model.settings for why)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gr_core.train.layout import DistributedConfig

UNDECIDING = (
    "save_every_steps",
    "keep_checkpoints",
    "memory_gib",
    "planned_rows",
    "peak_tflops",
    "price_per_gpu_hour",
    "retrain_window_days",
)
"""Keys that change no weight: a training that is taken up with others goes on."""
SPARSE_OPTIMIZERS = ("rowwise_adagrad",)


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
    sparse_optimizer: str = "rowwise_adagrad"
    """Optimizer of the embedding tables; rowwise_adagrad, one number of state a row, is the only one: it moves the rows
    that a step touched and no others."""
    sparse_update: Literal["step", "backward"] = "step"
    """When table rows move: once a step, with the gradients of all its micro-batches, or inside the backward pass, which
    needs micro_batches = 1 and one rank. The results are the same."""
    accumulator_decay: float = 1.0
    """Factor on the state of rowwise Adagrad at a night's warm start: below 1, rows go on learning faster than their whole
    past would let them; 1 keeps it."""
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
    half_life_days: float | None = None
    """Loss weight of a due event halves for each such age, counted back from the night's cutoff; unset: age changes
    nothing."""
    position_feature: str | None = None
    """Feature of the model that tells an event's place in its list or slot; unset: the place changes nothing."""
    position_weights: dict[str, float] = field(default_factory=dict)
    """Loss weight by value of position_feature; 1 where not named. Against position bias give 1 / (the chance that the
    place is looked at); to trust what lies high give less to what lies low."""
    negative_fraction: float = 1.0
    """Share of the trained users' labels 0 that are kept, by a stable hash of event and seed: an event without a kept label
    is no target. Training corrects the logits by log(fraction), so evaluation and serving need nothing."""
    replay_fraction: float = 0.0
    """Share of trained users, by a stable hash of user and seed, whose old events (inside the parent's watermark) are
    trained on again beside the night's due ones; 0: none."""
    kernels: Literal["auto", "reference", "triton"] = "auto"
    """Lookup, merged gradients, tables' updates and metrics: Triton on CUDA and plain torch elsewhere, or one of the two."""
    metrics: Literal["fused", "naive", "off"] = "fused"
    """AUC, NE and calibration while training: one histogram on the device; 1,000 thresholds, action by action, as most
    teams do it, to measure what that costs; or none."""
    peak_tflops: float | None = None
    """Peak of one rank, TFLOP/s, that utilisation (perf/mfu) is measured against; unset: a known GPU's data sheet at the
    run's precision, else what a matrix product reaches when the run starts."""
    price_per_gpu_hour: float = 0.0
    """Price of an hour of one GPU, for perf/cost; 0: no cost is told. On the CPU perf/core_seconds stands alone."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: the trunk's matrices and attention under autocast; parameters, logits, losses and optimizers stay fp32."""
    activation_checkpointing: Literal["none", "block"] = "none"
    """block: backward computes each block again instead of keeping its activations: less memory, the same gradients."""
    compile: Literal["off", "blocks"] = "off"
    """blocks: torch.compile for what surrounds attention in each block. Needs a C++ compiler (CPU) or Triton (CUDA); the
    first training of a home compiles for a minute, later ones read its cache."""
    memory_gib: float | None = None
    """Memory of one rank (GiB) that pack.token_budget = "auto" fits a step into; unset: there is no such limit."""
    planned_rows: dict[str, int] = field(default_factory=dict)
    """Rows by table that "auto" leaves memory for, where a table has fewer yet: the budget then stays as tables grow."""
    fused_optimizer: bool = True
    """AdamW in one kernel; false: torch's default, a loop over parameters, to measure what that costs."""
    fused_lookup: bool = True
    """Tables are read and updated together; false: one table after the other, to measure what that costs."""
    update_touched_rows: bool = True
    """A step updates the table rows that its batches hold; false: every row of every table, most with a gradient of zero,
    as dense gradients do, to measure what that costs. The result is the same."""
    num_threads: int = 2
    """CPU threads of the training process; part of what makes a digest repeatable."""
    save_every_steps: int = 0
    """Optimizer steps between two checkpoints of a running training: one that is killed goes on from the newest, and
    evaluation beside training scores them; 0 saves at the end alone."""
    keep_checkpoints: int = 2
    """How many of a running training's newest checkpoints are kept; all go when the final one is there."""
    retrain_window_days: int = 28
    """Lake days that a full retrain trains on at a time, oldest first, each such window warm-started from the one before;
    within a window users are shuffled, as within a night."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Ranks of the training; a step's batches (micro_batches) are shared out among them."""

    def __post_init__(self) -> None:
        """Check ranges; ValueError names the key, the rule and the value."""
        for name in ("dense_learning_rate", "sparse_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} must be a finite number above 0, got {getattr(self, name)}")
        for name in ("warmup_fraction", "final_fraction", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("weight_decay", "clip_norm", "initial_accumulator", "price_per_gpu_hour"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} must be a finite number, at least 0, got {getattr(self, name)}")
        for name in ("micro_batches", "num_threads", "keep_checkpoints", "retrain_window_days"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if self.save_every_steps < 0:
            raise ValueError(f"train.save_every_steps must be at least 0, got {self.save_every_steps}")
        if self.micro_batches < self.distributed.ranks:
            raise ValueError(
                f"train.micro_batches must be at least the number of ranks, train.distributed.replicate x shard = "
                f"{self.distributed.ranks}, got {self.micro_batches}: a step's batches are shared out among the ranks; set "
                f"train.micro_batches = {self.distributed.ranks} or fewer ranks"
            )
        self._check_weighting()
        self._check_measuring()
        self._check_compute()
        self._check_sparse()

    def _check_compute(self) -> None:
        allowed = {
            "precision": ("fp32", "bf16"),
            "activation_checkpointing": ("none", "block"),
            "compile": ("off", "blocks"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"train.{name} must be {' or '.join(values)}, got {getattr(self, name)!r}")
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ValueError(f"train.memory_gib must be a finite number above 0, or unset, got {self.memory_gib}")
        for table, rows in self.planned_rows.items():
            if rows < 1:
                raise ValueError(f"train.planned_rows.{table} must be at least 1, got {rows}")
        for name in ("fused_lookup", "update_touched_rows"):
            if not getattr(self, name) and self.distributed.ranks > 1:
                raise ValueError(
                    f"train.{name} = false measures one process, got {self.distributed.ranks} ranks; set "
                    "train.distributed.strategy = none"
                )

    def _check_sparse(self) -> None:
        """Refuse what the tables' optimizer cannot do (design section 5), before any data is built."""
        if self.sparse_optimizer not in SPARSE_OPTIMIZERS:
            raise ValueError(
                f"train.sparse_optimizer must be one of {', '.join(SPARSE_OPTIMIZERS)}, got {self.sparse_optimizer!r}; "
                "Adam and AdamW take no sparse gradients and move rows that a step did not touch"
            )
        if self.sparse_update not in ("step", "backward"):
            raise ValueError(f"train.sparse_update must be step or backward, got {self.sparse_update!r}")
        if not 0 < self.accumulator_decay <= 1:
            raise ValueError(f"train.accumulator_decay must be in (0, 1], got {self.accumulator_decay}")
        if self.sparse_update == "backward" and (self.micro_batches > 1 or self.distributed.ranks > 1):
            raise ValueError(
                "train.sparse_update = backward needs train.micro_batches = 1 and one rank, since rows move before another "
                f"micro-batch's or rank's gradient is known, got micro_batches = {self.micro_batches} and "
                f"{self.distributed.ranks} ranks; set train.sparse_update = step"
            )

    def _check_measuring(self) -> None:
        if self.kernels not in ("auto", "reference", "triton"):
            raise ValueError(f"train.kernels must be auto, reference or triton, got {self.kernels!r}")
        if self.metrics not in ("fused", "naive", "off"):
            raise ValueError(f"train.metrics must be fused, naive or off, got {self.metrics!r}")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ValueError(f"train.peak_tflops must be a finite number above 0, or unset, got {self.peak_tflops}")

    def _check_weighting(self) -> None:
        for action, weight in self.action_weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"train.action_weights.{action} must be a finite number, at least 0, got {weight}")
        if self.half_life_days is not None and not 0 < self.half_life_days < math.inf:
            raise ValueError(f"train.half_life_days must be a finite number above 0, got {self.half_life_days}")
        if bool(self.position_weights) != (self.position_feature is not None):
            raise ValueError(
                "train.position_weights and train.position_feature go together, got "
                f"{self.position_weights} and {self.position_feature!r}; set both or neither"
            )
        for place, weight in self.position_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"train.position_weights.{place} must be a finite number above 0, got {weight}")
        if not 0 < self.negative_fraction <= 1:
            raise ValueError(f"train.negative_fraction must be in (0, 1], got {self.negative_fraction}")
        if not 0 <= self.replay_fraction < 1:
            raise ValueError(f"train.replay_fraction must be in [0, 1), got {self.replay_fraction}")
