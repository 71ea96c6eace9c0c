"""The `evaluation` section of a config: how checkpoints are scored beside a running training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gr_core.section import CENTURY_DAYS, Section


class EvaluationConfig(Section):
    """Scoring of a running training's checkpoints on the holdout, in a process of its own."""

    parallel: bool = True
    """Score each checkpoint of train.save_every_steps while training goes on (with 0 there is none), and the final one,
    which the gate then need not score. It chooses nothing: the challenger is always the last checkpoint."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of that process; training's own are train.num_threads."""
    device: Literal["cpu", "auto"] = "cpu"
    """Where that process scores. auto: on CUDA where there is one, which it then shares with training, and whose memory
    must hold one more copy of the tables."""
    niceness: int = Field(default=10, ge=0, le=19)
    """How far that process gives way to training where they share cores: 0 not at all, 19 it takes what is left over."""
    wait_seconds: int = Field(default=600, ge=0, le=CENTURY_DAYS * 86_400)
    """How long the night waits, once training has ended, for the final checkpoint's score; then the gate scores it itself."""
