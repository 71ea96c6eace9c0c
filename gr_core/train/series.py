"""What each optimizer step of a night was like: loss, gradient norm, learning rates; an Arrow file in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from gr_core.errors import FormatError

SERIES_FILE = "steps.arrow"
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),  # of the lineage, counted after it was taken
        pa.field("batch", pa.int64(), nullable=False),  # the step's first, in the pack
        pa.field("loss", pa.float64(), nullable=False),
        pa.field("gradient_norm", pa.float64(), nullable=False),  # of the dense parameters, before clipping
        pa.field("dense_learning_rate", pa.float64(), nullable=False),
        pa.field("sparse_learning_rate", pa.float64(), nullable=False),
    ]
)


class StepSeries:
    """The steps of a night, in their order: 48 bytes each."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._columns["step"])

    def add(self, step: int, batch: int, *, loss: float, norm: float, rates: Mapping[str, float | None]) -> None:
        """Note one step; a rate that did not move anything is 0."""
        row = {"step": step, "batch": batch, "loss": loss, "gradient_norm": norm}
        row |= {name: 0.0 if rate is None else rate for name, rate in rates.items()}
        for name, values in self._columns.items():
            values.append(row[name])

    def to_bytes(self) -> bytes:
        """Return the series as an Arrow IPC file."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(pa.table(self._columns, schema=SCHEMA))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def load(self, checkpoint: Path) -> None:
        """Go on from the series in a checkpoint's directory.

        Raises:
            FormatError: As `read_series`.
        """
        self._columns = read_series(checkpoint)


def step_metrics(checkpoint: Path, *, most: int = 1000) -> dict[int, dict[str, float]]:
    """Return train/step/* by step, for a registry; of more steps than `most`, evenly spaced ones, the first and the last too.

    Raises:
        FormatError: As `read_series`.
    """
    series = read_series(checkpoint)
    steps = series["step"]
    places: Sequence[int] = range(len(steps))
    if len(steps) > most:
        places = [round(i * (len(steps) - 1) / (most - 1)) for i in range(most)]
    names = [name for name in SCHEMA.names if name not in ("step", "batch")]
    return {steps[i]: {f"train/step/{name}": series[name][i] for name in names} for i in places}


def read_series(checkpoint: Path) -> dict[str, list[Any]]:
    """Return the columns of SCHEMA by name, from a checkpoint's directory; empty where it was written without a series.

    Raises:
        FormatError: The file cannot be read, or has other columns.
    """
    path = checkpoint / SERIES_FILE
    if not path.exists():
        return {name: [] for name in SCHEMA.names}
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        return {name: table.column(name).to_pylist() for name in SCHEMA.names}
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise FormatError(f"{path} cannot be read: {error}; restore or train again", where=str(path)) from error
