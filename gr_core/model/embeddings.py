"""Embedding tables: several tables end to end in one flat weight, looked up at once, kept apart from autograd.

The weight is no autograd parameter. A step gathers the batch's distinct rows (duplicates merged), differentiates with
respect to those, and the optimizer writes them back: what a step costs follows the batch, not the tables.
Dims: `R` rows of all tables, `D` width, `M` ids, `U` distinct rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from gr_core.errors import FormatError
from gr_core.schema import FIRST_FALLBACK_ROW, PAD_ROW
from kernels.embedding import merge_gradients, rowwise_adagrad

Longs = npt.NDArray[np.int64]
INIT_SCALE = 0.02


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table of a vocabulary, as training needs it."""

    name: str
    """The feature it serves."""
    rows: int
    """Rows in use, reserved ones included."""
    capacity: int
    """Rows planned for; at least `rows`."""
    fallbacks: int = 1
    """Fallback rows, from row 2 on."""
    fallback_of: Longs | None = None
    """Fallback row of each row, [rows]; None: row 2 for every real row."""

    def fallback_rows(self) -> Longs:
        """Return each row's fallback row, [rows]; reserved rows stand for themselves."""
        reserved = FIRST_FALLBACK_ROW + self.fallbacks
        rows = np.full(self.rows, FIRST_FALLBACK_ROW, np.int64)
        if self.fallback_of is not None:
            rows = self.fallback_of[: self.rows].astype(np.int64)
        rows[:reserved] = np.arange(min(reserved, self.rows))
        return rows


def read_tables(values: Mapping[str, Mapping[str, Any]], root: Path) -> tuple[TableSpec, ...]:
    """Read the "vocabulary" of RUN.json: {table: {"rows", "capacity", "fallbacks", "path"}}, paths below `root`.

    Raises:
        FormatError: A table's file is missing or no Arrow file, or its rows do not fit.
    """
    specs = []
    for name, value in values.items():
        rows, fallbacks = int(value["rows"]), int(value.get("fallbacks", 1))
        path = value.get("path")
        specs.append(
            TableSpec(
                name=name,
                rows=rows,
                capacity=int(value.get("capacity", rows)),
                fallbacks=fallbacks,
                fallback_of=read_fallbacks(root / path, rows) if path else None,
            )
        )
    return tuple(specs)


def read_fallbacks(path: Path, rows: int) -> Longs:
    """Return the fallback row of each row from a vocabulary's <table>.arrow, [rows].

    Raises:
        FormatError: Missing or no Arrow file, or it names a row at or above `rows`.
    """
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            row = table.column("row").to_numpy()
            fallback = table.column("fallback").to_numpy()
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise FormatError(f"vocabulary table {path} cannot be read: {error}; grow it again", where=str(path)) from error
    admitted = row >= 0
    if admitted.any() and int(row[admitted].max()) >= rows:
        raise FormatError(
            f"vocabulary table {path} has row {int(row[admitted].max())}, but only {rows} rows are in use; "
            "name the table of the same version",
            where=str(path),
        )
    rows_of = np.full(rows, FIRST_FALLBACK_ROW, np.int64)
    rows_of[row[admitted]] = fallback[admitted]
    return rows_of


class RowMap:
    """Turns a pack's rows into rows of the flat weight.

    A row at or above a table's known rows maps to its fallback row, so that a parent scored on its child's pack sees
    what it would see on its own.

    Args:
        tables: The tables in weight order, with the PACK's rows and fallbacks.
        known_rows: Rows of each table that the weight has; None: all.
    """

    def __init__(self, tables: Sequence[TableSpec], known_rows: Mapping[str, int] | None = None) -> None:
        self.known = {t.name: t.rows if known_rows is None else known_rows[t.name] for t in tables}
        self._fallback = {t.name: t.fallback_rows() for t in tables}
        self.fallbacks = {t.name: t.fallbacks for t in tables}
        self.offset: dict[str, int] = {}
        total = 0
        for table in tables:
            self.offset[table.name] = total
            total += self.known[table.name]
        self.num_rows = total

    def map(self, feature: str, rows: npt.NDArray[np.int32]) -> Longs:
        """Return flat rows, [M] int64, of a table's rows, [M] int32."""
        known, fallback = self.known[feature], self._fallback[feature]
        local = rows.astype(np.int64)
        if known < len(fallback):
            local = np.where(local < known, local, fallback[np.minimum(local, len(fallback) - 1)])
        elif local.size and int(local.max()) >= known:
            local = np.where(local < known, local, FIRST_FALLBACK_ROW)
        return local + self.offset[feature]

    def drop(self, feature: str, rows: Longs, fraction: float, rng: np.random.Generator) -> Longs:
        """Replace a share of flat rows by their fallback rows: this is what trains the fallback rows."""
        begin = self.offset[feature]
        fallback = self._fallback[feature]
        dropped = rng.random(len(rows), dtype=np.float32) < fraction
        return np.where(dropped, fallback[rows - begin] + begin, rows)

    def pad_rows(self) -> Longs:
        """Return the flat pad rows; they stay zero."""
        return np.asarray([begin + PAD_ROW for begin in self.offset.values()], np.int64)


class Tables:
    """The weights of all tables and the state of their optimizer.

    Args:
        specs: Tables in weight order.
        width: D.
        initial_accumulator: Rowwise Adagrad's state of a row without history.
        seed: Of the initial weights; each table has its own stream, so another table changes nothing in this one.
        device: Where the weight lies.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        width: int,
        *,
        initial_accumulator: float = 0.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs = tuple(specs)
        self.width = width
        weights = [initial_rows(spec, number, width, seed) for number, spec in enumerate(self.specs)]
        self.weight = torch.cat(weights).to(device) if weights else torch.zeros(0, width, device=device)
        self.accumulator = torch.full((self.weight.shape[0],), initial_accumulator, device=device)
        self.map = RowMap(self.specs)

    def read(self, rows_U: Tensor) -> Tensor:
        """Return a batch's distinct flat rows, [U, D], in the given order."""
        return self.weight.index_select(0, rows_U)  # four times as fast on the CPU as an index

    def merge(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Merge the (rows [U], gradients [U, D]) of a step's micro-batches: rows of `weight`, and one gradient each."""
        return merge_gradients(parts)

    def update(self, rows_U: Tensor, grad_UD: Tensor, learning_rate: float) -> None:
        """Move rows of `weight` along their gradients, [U, D], by rowwise Adagrad; a row stands once."""
        rowwise_adagrad(self.weight, self.accumulator, rows_U, grad_UD, learning_rate=learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return views by name: sparse.<table>.weight [rows, D], optimizer.sparse.<table>.accumulator [rows]."""
        views = {}
        for spec in self.specs:
            begin = self.map.offset[spec.name]
            views[f"sparse.{spec.name}.weight"] = self.weight[begin : begin + spec.rows]
            views[f"optimizer.sparse.{spec.name}.accumulator"] = self.accumulator[begin : begin + spec.rows]
        return views

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a parent's rows and state; rows that it did not have start as its fallback rows do.

        Raises:
            FormatError: A table or a row of the parent is missing here.
        """
        own = self.state()
        for spec in self.specs:
            for name in (f"sparse.{spec.name}.weight", f"optimizer.sparse.{spec.name}.accumulator"):
                own[name].copy_(grown_rows(name, spec, tensors, tuple(own[name].shape)))


def initial_rows(spec: TableSpec, number: int, width: int, seed: int) -> Tensor:
    """Return a new table's weights, [rows, D]: they follow from the seed and the table's place in the weight alone."""
    rng = np.random.default_rng([seed, number])
    rows = rng.standard_normal((spec.rows, width), dtype=np.float32) * np.float32(INIT_SCALE)
    reserved = FIRST_FALLBACK_ROW + spec.fallbacks
    # a new lineage's rows start where later ones do: at their fallback row, plus noise that tells them apart
    rows[reserved:] += rows[spec.fallback_rows()[reserved:]]
    rows[PAD_ROW] = 0
    return torch.from_numpy(rows)


def grown_rows(name: str, spec: TableSpec, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a parent's tensor of a table in this run's shape; rows that it did not have are its fallback rows.

    Raises:
        FormatError: The parent does not have it, or has more rows or another width.
    """
    if name not in tensors:
        raise FormatError(f"the parent has no tensor {name}; a new table is a full retrain", where=name)
    old = tensors[name]
    if len(old) > shape[0] or tuple(old.shape[1:]) != shape[1:]:
        raise FormatError(
            f"the parent's {name} has shape {tuple(old.shape)}, this run's {shape}; "
            "rows never shrink and the width is fixed along a lineage",
            where=name,
        )
    fallback = torch.from_numpy(spec.fallback_rows()[len(old) :]).to(old.device)
    return torch.cat([old, old[fallback]])
