"""What the loss of a step is divided by, known before its first backward, and how a night's tokens are weighted.

Without half-life and position weights the pack index holds each batch's sum. Those two depend on settings that may change
while the pack stays, so their sums are read off the pack's columns, each batch's once; every rank can do that for the
batches of all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.data.batches import PackReader
from gr_core.errors import ConfigError, FormatError
from gr_core.model.weighting import Weighting
from gr_core.train.run import Run

logger = logging.getLogger(__name__)


class BatchWeights:
    """The loss weight of each batch of a pack, under a weighting.

    Args:
        reader: The pack.
        weighting: The weighting.
    """

    def __init__(self, reader: PackReader, weighting: Weighting) -> None:
        self._reader, self._weighting = reader, weighting
        sums: Sequence[float] = reader.index["batch_weights"][weighting.normalize]
        self._known: dict[int, float] = dict(enumerate(sums)) if weighting.is_plain else {}

    def of(self, number: int) -> float:
        """Return the sum of a batch's weights."""
        if number not in self._known:
            self._known[number] = self._weighting.total(self._reader.batch(number))
        return self._known[number]


def weighting_of(run: Run, index: Mapping[str, Any]) -> Weighting:
    """Return how a run weights the tokens of its pack.

    Args:
        run: The run.
        index: The pack's index.

    Raises:
        ConfigError: train.half_life_days without a bound in the pack; train.position_weights for a feature that the
            model has no table of, or whose vocabulary file the run does not name.
        FormatError: That file cannot be read.
    """
    train = run.train
    if train.half_life_days is not None and index["bound"] is None:
        raise ConfigError(
            f"train.half_life_days = {train.half_life_days} counts back from the night's cutoff, which the pack {run.pack} "
            "does not say (its bound is null); write the pack with a bound, or leave the key out",
            where="train.half_life_days",
        )
    return Weighting(
        normalize=train.normalize,
        half_life_days=train.half_life_days,
        cutoff_us=index["bound"]["cutoff_us"] if index["bound"] else 0,
        position_feature=train.position_feature,
        position_weights=_position_weights(run, train.position_feature) if train.position_feature else None,
    )


def logit_offset(index: Mapping[str, Any]) -> float:
    """Return what is added to the logits of a pack while it is trained on: -log(negative_fraction), else 0.

    Of the labels 0 only a fraction f stands in such a pack, so the odds in it are 1/f of the true ones for every action
    (gr_core.data.sampling). Trained with that offset the model's own logits are those of the whole data: evaluation,
    gate and serving need no correction. (p / (p + (1 - p) / f) at serving is the same arithmetic, to be done everywhere.)
    """
    fraction = float(index.get("negative_fraction", 1.0))
    return -math.log(fraction) if fraction < 1.0 else 0.0


def _position_weights(run: Run, feature: str) -> npt.NDArray[np.float32]:
    """Return the weight of every row of the feature's table: 1 where its id is not named."""
    spec = next((table for table in run.tables if table.name == feature), None)
    file = run.vocabulary_files.get(feature)
    if spec is None or file is None:
        raise ConfigError(
            f"train.position_feature must be a feature of the model whose vocabulary file RUN.json names, got {feature!r}; "
            f"name one of {sorted(run.vocabulary_files)}, or leave the key out",
            where="train.position_feature",
        )
    rows = _own_rows(file)
    missing = sorted(set(run.train.position_weights) - rows.keys())
    if missing:
        logger.warning(
            "train.position_weights: %s has no row for %s; they weigh nothing more than others", feature, missing
        )
    weights = np.ones(spec.capacity, np.float32)
    for name, weight in run.train.position_weights.items():
        if name in rows:
            weights[rows[name]] = weight
    return weights


def _own_rows(file: Path) -> dict[str, int]:
    """Return id -> row of a vocabulary table; ids without a row of their own are left out."""
    try:
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_file(source).read_all()
            ids, rows = (table.column(name).to_pylist() for name in ("id", "row"))
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise FormatError(f"vocabulary table {file} cannot be read: {error}; grow it again", where=str(file)) from error
    return {name: row for name, row in zip(ids, rows, strict=True) if row >= 0}
