"""The `evaluation` section of a config: how checkpoints are scored beside a running training, and the slices of metrics."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gr_core.section import CENTURY_DAYS, Section

SliceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=40)]
RESERVED_SLICES = frozenset({"all", "day"})  # the whole, and the days that `compare` shows


class SliceConfig(Section):
    """One way to part the evaluated events; each part, such as surface=feed, has metrics of its own."""

    name: SliceName
    """Names the slices, as in surface=feed; in MLflow next_day/auc/click/surface:feed, since MLflow allows no `=`."""
    by: Literal["feature", "history", "items"]
    """feature: the value of a side feature; history: how many history entries the event sees (at most
    sequences.max_history), such as new, seldom and heavy users; items: new items, which have no embedding row of their own
    in the parent's vocabulary, and known ones."""
    feature: str | None = None
    """by = "feature": the side feature. Null is the slice `unknown`."""
    values: tuple[str, ...] = ()
    """by = "feature": the values with a slice each, the rest being `other`; empty: the most frequent ones."""
    max_values: int = Field(default=8, ge=1, le=100)
    """by = "feature" without values: how many values have a slice each."""
    bounds: tuple[int, ...] = (1, 20)
    """by = "history": rising numbers of entries at which the next slice begins: 0 to below 1, 1 to below 20, from 20 on."""
    labels: tuple[Label, ...] = ("new", "seldom", "heavy")
    """by = "history": the slices' names, one more than bounds."""
    veto: bool = True
    """Whether a slice that is worse beyond gate.slice_margin holds the challenger."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        where = f"evaluation.slices[{self.name}]"
        if self.name in RESERVED_SLICES:
            raise ValueError(f"{where}.name: {self.name!r} is taken by Daybreak; choose another name")
        if (self.feature is not None) != (self.by == "feature"):
            raise ValueError(f'{where}.feature must name a side feature with by = "feature", and stand nowhere else')
        if len(set(self.values)) != len(self.values):
            raise ValueError(f"{where}.values must be different, got {list(self.values)}")
        if not self.bounds or self.bounds[0] < 1 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(f"{where}.bounds must rise from at least 1, such as [1, 20], got {list(self.bounds)}")
        if len(set(self.labels)) != len(self.bounds) + 1 or len(self.labels) != len(self.bounds) + 1:
            raise ValueError(
                f"{where}.labels must be {len(self.bounds) + 1} different names, one more than bounds, got "
                f"{list(self.labels)}"
            )
        return self


class EvaluationConfig(Section):
    """Scoring of a running training's checkpoints on the holdout, in a process of its own; and the slices of metrics."""

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
    slices: tuple[SliceConfig, ...] = (
        SliceConfig(name="activity", by="history"),
        SliceConfig(name="items", by="items"),
    )
    """How evaluation, gate, `compare` and the page part the events; [] for the whole alone."""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [one.name for one in self.slices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"evaluation.slices: {twice} are named twice; slices need different names")
        return self

    def check_features(self, sides: Collection[str]) -> None:
        """Refuse slices by a feature that no feed gives; ValueError names it."""
        for one in self.slices:
            if one.feature is not None and one.feature not in sides:
                raise ValueError(
                    f"evaluation.slices[{one.name}].feature must be a side feature {sorted(sides)}, got "
                    f"{one.feature!r}; add it to source.feeds.side, or leave the slice out"
                )
