"""Embedding tables over several ranks: rows sharded inside a copy of the model, gradients merged over the copies.

Flat row r lies on rank r % S of its copy, at place r // S: frequent rows, which vocabularies hand out first, are spread
evenly. A micro-batch fetches its distinct rows from their owners; once a step every owner gets the gradients of its rows,
adds them up in the order of the ranks, and does so again over the copies. All copies add the same numbers in the same
order, so they stay equal to the last bit.
Dims: `R` rows of all tables, `D` width, `U` distinct rows of a micro-batch, `S` ranks of a copy, `C` copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gr_core.model.embeddings import RowMap, Tables, TableSpec, grown_rows, initial_rows
from kernels.embedding import merge_gradients

_GATHERED_ROWS = 2**18  # sent to the first rank at once: 64 MiB at width 64

Part = tuple[Tensor, Tensor]
"""Distinct rows [U] int64 and their gradients [U, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """A rank's two groups."""

    shard: dist.ProcessGroup
    """The ranks of its copy of the model."""
    replicate: dist.ProcessGroup
    """The ranks that hold the same shard in other copies."""


class ShardedTables(Tables):
    """A rank's rows of all tables. Every method that other ranks have a part in is called by all of them.

    Args:
        specs: Tables in weight order.
        width: D.
        links: The rank's groups.
        initial_accumulator: Rowwise Adagrad's state of a row without history.
        seed: Of the initial weights, which are those of one process.
        device: Where the rank's rows lie.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        width: int,
        links: Links,
        *,
        initial_accumulator: float = 0.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs = tuple(specs)
        self.width = width
        self.map = RowMap(self.specs)
        self._links = links
        self._count, self._index = links.shard.size(), links.shard.rank()
        own = self._own_slots(self.map.num_rows)
        self.weight = torch.empty(own, width, device=device)
        for number, spec in enumerate(self.specs):
            self._put(self.weight, spec, initial_rows(spec, number, width, seed))
        self.accumulator = torch.full((own,), initial_accumulator, device=device)

    def read(self, rows_U: Tensor) -> Tensor:
        """Fetch rows from their owners, [U, D], in the given order."""
        if self._count == 1:
            return self.weight[rows_U]
        order, sent = self._by_owner(rows_U)
        received = self._counts(sent)
        asked = self._swap(rows_U[order] // self._count, sent, received)
        values = self._swap(self.weight[asked], received, sent)
        return torch.empty_like(values).index_copy_(0, order, values)

    def merge(self, parts: Sequence[Part]) -> Part:
        """Return this rank's rows (places in its own weight) that any rank touched, and the sums of their gradients."""
        rows, grad = merge_gradients(parts)
        if self._count > 1:
            order, sent = self._by_owner(rows)
            received = self._counts(sent)
            own = self._swap(rows[order] // self._count, sent, received)
            grads = self._swap(grad[order], sent, received)
            rows, grad = _add_in_order(list(zip(torch.split(own, received), torch.split(grads, received), strict=True)))
        return _add_in_order(self._of_all_copies(rows, grad)) if self._links.replicate.size() > 1 else (rows, grad)

    def state(self) -> dict[str, Tensor]:
        """Return the whole tables by name, as one process has them, in the first rank's host memory; {} on the others."""
        if self._count == 1:
            return super().state() if self._links.replicate.rank() == 0 else {}
        if self._links.replicate.rank():
            return {}
        weight, accumulator = self._gathered(self.weight), self._gathered(self.accumulator)
        views = {}
        if self._index == 0:
            for spec in self.specs:
                own = slice(self.map.offset[spec.name], self.map.offset[spec.name] + spec.rows)
                views[f"sparse.{spec.name}.weight"] = weight[own]
                views[f"optimizer.sparse.{spec.name}.accumulator"] = accumulator[own]
        return views

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a parent's rows and state, whatever number of ranks wrote them; as `Tables.load`."""
        for spec in self.specs:
            for name, own in (("sparse.{}.weight", self.weight), ("optimizer.sparse.{}.accumulator", self.accumulator)):
                shape = (spec.rows, *own.shape[1:])
                self._put(own, spec, grown_rows(name.format(spec.name), spec, tensors, shape))

    def _own_slots(self, num_rows: int) -> int:
        """Return how many of the first so many flat rows are this rank's."""
        return max(0, -(-(num_rows - self._index) // self._count))

    def _put(self, own: Tensor, spec: TableSpec, table: Tensor) -> None:
        """Copy this rank's rows of a whole table to their places."""
        offset = self.map.offset[spec.name]
        mine = table[(self._index - offset) % self._count :: self._count]
        first = self._own_slots(offset)
        own[first : first + len(mine)] = mine.to(own.device)

    def _by_owner(self, rows_U: Tensor) -> tuple[Tensor, list[int]]:
        """Return an order that puts rows with their owners, and how many each owner has."""
        owner = rows_U % self._count
        counts: list[int] = torch.bincount(owner, minlength=self._count).tolist()
        return torch.argsort(owner, stable=True), counts

    def _counts(self, sent: Sequence[int]) -> list[int]:
        """Tell every rank of the copy how much it is sent; returns how much comes from each."""
        there = torch.tensor(sent, dtype=torch.int64, device=self.weight.device)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self._links.shard)
        counts: list[int] = here.tolist()
        return counts

    def _swap(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows [sum(sent), *] to the ranks of the copy, and return what came, [sum(received), *]."""
        out = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(out, values.contiguous(), received, sent, group=self._links.shard)
        return out

    def _of_all_copies(self, rows: Tensor, grad: Tensor) -> list[Part]:
        """Return what each copy has for this shard, in their order; sent padded to the longest."""
        group = self._links.replicate
        lengths: list[int] = gather_all(rows.new_tensor([len(rows)]), group).tolist()
        longest = max(lengths)
        all_rows = gather_all(_padded(rows, longest), group).view(-1, longest)
        all_grads = gather_all(_padded(grad, longest), group).view(-1, longest, grad.shape[1])
        return [(all_rows[copy, :n], all_grads[copy, :n]) for copy, n in enumerate(lengths)]

    def _gathered(self, own: Tensor) -> Tensor:
        """Return all ranks' rows in flat order, [R, *], in the host memory of the copy's first rank; piece by piece."""
        group, first = self._links.shard, dist.get_global_rank(self._links.shard, 0)
        slots = -(-self.map.num_rows // self._count)
        whole = own.new_empty(slots * self._count if self._index == 0 else 0, *own.shape[1:], device="cpu")
        for begin in range(0, slots, _GATHERED_ROWS):
            size = min(_GATHERED_ROWS, slots - begin)
            piece = _padded(own[begin : begin + size], size)
            parts = [torch.empty_like(piece) for _ in range(self._count)] if self._index == 0 else None
            dist.gather(piece, parts, dst=first, group=group)
            for index, part in enumerate(parts or []):
                whole[begin * self._count + index : (begin + size) * self._count : self._count] = part.cpu()
        return whole[: self.map.num_rows]


def gather_all(own: Tensor, group: Any) -> Tensor:
    """Return what every rank of a group gives, [ranks * first dimension, *], in their order; equal shapes, contiguous."""
    out = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
    gather(out, own, group=group)
    return out


def _padded(values: Tensor, length: int) -> Tensor:
    """Return the values with zeros behind them, [length, *], contiguous."""
    out = values.new_zeros(length, *values.shape[1:])
    out[: len(values)] = values
    return out


def _add_in_order(parts: Sequence[Part]) -> Part:
    """Merge parts into one gradient a row, added one part after the other.

    One index_add_ over all of them at once is free to add in any order on CUDA, and the copies would drift apart.
    """
    rows, places = torch.unique(torch.cat([rows for rows, _ in parts]), return_inverse=True)
    merged = parts[0][1].new_zeros(len(rows), parts[0][1].shape[1])
    for place, (_, grad) in zip(torch.split(places, [len(own) for own, _ in parts]), parts, strict=True):
        merged.index_add_(0, place, grad)
    return rows, merged
