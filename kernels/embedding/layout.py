"""Where the rows of each feature's table lie in the flat weight, and which row stands in for one it does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAD_ROW = 0
"""Row of every table that contributes zero and is never updated, as gr_core.schema has it."""
FALLBACK_ROW = 2
"""Row that stands in for one above `known` where a table names no other, as gr_core.schema has it."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Layout:
    """The tables of F features in a flat weight; built once a night by `of`. Features may share a table.

    An id at or above `known` reads the fallback row that its table names for it, or for its last row where the id lies
    beyond the named ones; a table that names none has FALLBACK_ROW. Ids below 0 are absent, as pad rows are.
    """

    tables: Tensor
    """First flat row, known rows, named fallback rows and the place of their first in `fallback`; [F, 4] int64."""
    fallback: Tensor
    """Fallback rows by row, table after table, [K] int64; FALLBACK_ROW alone for one that names none."""
    num_rows: int
    """Rows that the flat weight has at least."""

    @classmethod
    def of(
        cls,
        first: Sequence[int],
        known: Sequence[int],
        fallbacks: Sequence[Tensor | None] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """Return the layout of features, in the order of an id's column.

        Args:
            first: First flat row of each feature's table.
            known: Rows that the weight has of it.
            fallbacks: Fallback row of each row of the ids' vocabulary, [rows]; None: FALLBACK_ROW for all.
            device: Where the ids will be.

        Raises:
            ValueError: Different lengths, or a fallback row that the weight does not have.
        """
        named = list(fallbacks) if fallbacks is not None else [None] * len(first)
        if not len(first) == len(known) == len(named):
            raise ValueError(
                f"need one entry a feature, got {len(first)} first, {len(known)} known, {len(named)} fallbacks"
            )
        rows, parts, place = [], [torch.zeros(0, dtype=torch.int64)], 0
        for number, (begin, count, own) in enumerate(zip(first, known, named, strict=True)):
            # where the weight knows every row that has a name, what lies above has none
            if own is None or count >= len(own):
                used = read = torch.tensor([FALLBACK_ROW])
            else:
                used = own.to("cpu", torch.int64)
                read = used[count:]
            worst = int(read.max())
            if begin < 0 or worst >= count or int(read.min()) < 0:
                raise ValueError(
                    f"feature {number} has {count} known rows from {begin} on, but its unknown ones read up to row {worst}"
                )
            rows.append((begin, count, len(used), place))
            parts.append(used)
            place += len(used)
        return cls(
            tables=torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device),
            fallback=torch.cat(parts).to(device),
            num_rows=max((begin + count for begin, count, _, _ in rows), default=0),
        )

    def to(self, device: torch.device | str) -> Layout:
        """Return the layout on a device."""
        moved = [self.tables.to(device), self.fallback.to(device)]
        return Layout(tables=moved[0], fallback=moved[1], num_rows=self.num_rows)
