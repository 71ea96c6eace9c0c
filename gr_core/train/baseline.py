"""Tables as most first training loops have them, to measure what fused lookups and touched rows save.

They hold and learn the same as `Tables`, bit for bit; only the work differs. Dims as gr_core.model.embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gr_core.model.embeddings import Tables, TableSpec
from gr_core.train.settings import TrainConfig
from kernels.embedding import rowwise_adagrad


class MakesTables(Protocol):
    """What is used of gr_core.train.distributed.Ranks."""

    device: torch.device

    def new_tables(self, specs: Sequence[TableSpec], width: int, **settings: Any) -> Tables:
        """Return the tables, or this rank's part of them."""


def new_tables(ranks: MakesTables, specs: Sequence[TableSpec], width: int, seed: int, train: TrainConfig) -> Tables:
    """Return a night's tables: train.fused_lookup and train.update_touched_rows say which."""
    settings: dict[str, Any] = {"initial_accumulator": train.initial_accumulator, "seed": seed}
    if train.fused_lookup and train.update_touched_rows:
        return ranks.new_tables(specs, width, **settings)
    return BaselineTables(specs, width, train, device=ranks.device, **settings)


class BaselineTables(Tables):
    """Tables that are read and updated one by one, or all of whose rows a step updates.

    Args:
        specs: Tables in weight order.
        width: D.
        train: `fused_lookup` and `update_touched_rows`.
        settings: As `Tables` has them.
    """

    def __init__(self, specs: Sequence[TableSpec], width: int, train: TrainConfig, **settings: Any) -> None:
        super().__init__(specs, width, **settings)
        self._one_by_one = not train.fused_lookup
        self._all_rows = not train.update_touched_rows
        ends = [self.map.offset[spec.name] + spec.rows for spec in self.specs]
        self._ends = torch.tensor(ends, device=self.weight.device)

    def read(self, rows_U: Tensor) -> Tensor:
        """Return a batch's distinct flat rows, [U, D]; rows are ascending."""
        if not self._one_by_one:
            return super().read(rows_U)
        return torch.cat([self.weight[begin:end][rows_U[a:b] - begin] for begin, end, a, b in self._parts(rows_U)])

    def update(self, rows_U: Tensor, grad_UD: Tensor, learning_rate: float) -> None:
        """Move rows along their gradients, [U, D]; rows are ascending."""
        parts = self._parts(rows_U) if self._one_by_one else [(0, len(self.weight), 0, len(rows_U))]
        for begin, end, a, b in parts:
            rows, grad = rows_U[a:b] - begin, grad_UD[a:b]
            if self._all_rows:
                grad = grad.new_zeros(end - begin, self.width).index_add_(0, rows, grad)
                rows = torch.arange(end - begin, device=grad.device)
            weight, accumulator = self.weight[begin:end], self.accumulator[begin:end]
            rowwise_adagrad(weight, accumulator, rows, grad, learning_rate=learning_rate)

    def _parts(self, rows_U: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """Return (first row, end, first place, end) of each table: its rows of the weight, and its places in `rows_U`."""
        cuts, a = torch.searchsorted(rows_U, self._ends).tolist(), 0
        for spec, b in zip(self.specs, cuts, strict=True):
            begin = self.map.offset[spec.name]
            yield begin, begin + spec.rows, a, b
            a = b
