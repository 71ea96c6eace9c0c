"""What the model needs of a batch, computed once with numpy: flat rows, layout, gaps, counts, labels, loss weights.

No Python per token and no gradient here. A target's inputs come from its own item, its context and the history in
[lo, hi) alone; its own actions never enter.
Dims: `T` tokens, `N` targets, `A` actions, `F` item features, `C` context features, `W` supervised actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gr_core.data.batches import Batch
from gr_core.data.interleaved import ENTRY_TOKENS
from gr_core.model.attention import AttentionPlan, Layout, Planner, plan_bucketed
from gr_core.model.attention.plan import Longs, list_tensors, map_tensors
from gr_core.model.embeddings import RowMap
from gr_core.model.settings import ModelConfig
from gr_core.model.weighting import Weighting
from gr_core.schema import FIRST_FALLBACK_ROW, PAD_ROW, REPLAYED
from kernels.embedding import merge_ids

Array = npt.NDArray[Any]
NUM_GAPS = 64
SHORT_WINDOW = 8
_HOUR_US = 3_600_000_000
_DAY_US = 24 * _HOUR_US


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A batch as the model reads it; places count into the batch's distinct rows [U]."""

    rows: Tensor
    """Distinct flat rows, [U] int64."""
    item_places: Tensor
    """[T, F] int64."""
    context_places: Tensor
    """[N, C] int64."""
    states: Tensor
    """Per action set / unset / unknown, and a last column that marks targets (interleaved: item tokens), [T, 3 A + 1] fp32."""
    gaps: Tensor
    """Log-bucketed time since the previous history token (targets: the newest history seen), [T] int64."""
    positions: Tensor
    """[T] int32."""
    times: Tensor | None
    """Microseconds since the segment's first token, [T] int64; None unless model.time = rope."""
    hours: Tensor
    """Hour of day, UTC, of targets, [N] int64."""
    weekdays: Tensor
    """Day of week, UTC, Thursday = 0, of targets, [N] int64."""
    counts: Tensor
    """What the visible history says about the target in numbers, [N, count_features] fp32."""
    targets: Tensor
    """Token numbers of targets, [N] int64."""
    labels: Tensor
    """[N, W] bool."""
    known: Tensor
    """Known and due, [N, W] bool."""
    fresh: Tensor
    """Due this night, not replayed: what in-training metrics count, [N] bool."""
    weights: Tensor
    """Loss weights, [N] fp32."""
    plan: AttentionPlan

    def to(self, device: torch.device) -> Inputs:
        """Return the same inputs on another device (itself when already there)."""
        if self.rows.device == device:
            return self
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return inputs with every tensor changed, the plan's too; each is changed once, in a fixed order."""
        mapped: Inputs = map_tensors(self, change)
        return mapped

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in the order of `map`."""
        return list_tensors(self)


def action_bits(mask: int) -> list[int]:
    """Return the bit numbers that are set, ascending."""
    return [bit for bit in range(31) if mask >> bit & 1]


def count_features(config: ModelConfig, num_supervised: int) -> int:
    """Return the width of `Inputs.counts`."""
    return 3 * num_supervised * (2 + len(config.item_features)) if config.history_counts else 0


class InputBuilder:
    """Turns batches into inputs.

    Args:
        config: The model's settings.
        num_actions: A.
        supervised: Bit mask of the supervised actions.
        row_map: From the pack's rows to flat rows.
        weighting: How much each target counts in the loss.
        planner: Lays batches out for the attention path (`attention.choose_attention`); None: bucketed.
        interleaved: Batches are item, action, item, action: every item token is read as a target is.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_actions: int,
        supervised: int,
        row_map: RowMap,
        *,
        weighting: Weighting | None = None,
        planner: Planner | None = None,
        interleaved: bool = False,
    ) -> None:
        self.config = config
        self.num_actions = num_actions
        self.bits = action_bits(supervised)
        self.row_map = row_map
        self.weighting = weighting or Weighting()
        self.planner: Planner = planner or plan_bucketed
        self.interleaved = interleaved

    def build(self, batch: Batch, rng: np.random.Generator | None = None) -> Inputs:
        """Compute a batch's inputs.

        Args:
            batch: A batch with at least one target.
            rng: Drops ids (training); None: keeps them all.

        Returns:
            The inputs, on the CPU.
        """
        targets = np.flatnonzero(batch.supervise.numpy())
        lo, hi = batch.lo.numpy().astype(np.int64), batch.hi.numpy().astype(np.int64)
        actions, known = batch.actions.numpy(), batch.known.numpy()
        asks = self._asks(batch)
        position = self._positions(batch, asks, hi)
        items = self._flat(batch, self.config.item_features, rng, None)
        context = self._flat(batch, self.config.context_features, rng, targets)
        flat = np.concatenate([items.ravel(), context.ravel()])
        rows, places = merge_ids(torch.from_numpy(flat), self.row_map.num_rows)
        time = batch.time.numpy()
        shown = time[targets]
        layout = self._layout(batch, lo, hi, targets, position)
        return Inputs(
            rows=rows,
            item_places=places[: items.size].view(items.shape),
            context_places=places[items.size :].view(context.shape),
            states=torch.from_numpy(self._states(actions, known, asks)),
            gaps=torch.from_numpy(_gaps(time, batch.segment_starts, hi, lo, np.flatnonzero(asks))),
            positions=torch.from_numpy(position),
            times=torch.from_numpy(time - time[layout.first_of]) if self.config.time == "rope" else None,
            hours=torch.from_numpy(shown // _HOUR_US % 24),
            weekdays=torch.from_numpy(shown // (24 * _HOUR_US) % 7),
            counts=torch.from_numpy(
                self._counts(self._acted(items, asks, batch.segment_starts), actions, known, lo, hi, targets)
            ),
            targets=torch.from_numpy(targets),
            labels=torch.from_numpy(_bits(batch.labels.numpy()[targets], self.bits)),
            known=torch.from_numpy(_bits(batch.label_known.numpy()[targets], self.bits)),
            fresh=torch.from_numpy(batch.supervise.numpy()[targets] != REPLAYED),
            weights=torch.from_numpy(self.weighting.weights(batch, targets)),
            plan=self.planner(layout),
        )

    def _asks(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Return which tokens show an item without its actions: targets, or all item tokens, [T]."""
        if self.interleaved:
            return np.asarray(batch.rows["item_id"].numpy() != PAD_ROW)
        return np.asarray(batch.supervise.numpy() != 0)

    def _positions(self, batch: Batch, asks: Array, hi: Longs) -> npt.NDArray[np.int32]:
        """Return the places by which tokens are told apart in attention, [T].

        An interleaved item token stands where the history that it sees ends, as a target does: how many tokens lie between
        the two depends on events shown later, where visibility delays differ.
        """
        position = batch.position.numpy()
        if not self.interleaved:
            return position
        starts = np.repeat(batch.segment_starts[:-1], np.diff(batch.segment_starts))
        return np.where(asks, hi - starts, position).astype(np.int32)

    def _acted(self, items: Array, asks: Array, segment_starts: Longs) -> Array:
        """Return the rows that tokens' actions belong to: an interleaved action token's are those of the item before it.

        A late action does not follow its item and belongs to none.
        """
        if not self.interleaved:
            return items
        own = np.flatnonzero(~asks[1:] & asks[:-1]) + 1
        own = own[~np.isin(own, segment_starts)]
        acted = items.copy()
        acted[own] = items[own - 1]
        return acted

    def _layout(self, batch: Batch, lo: Longs, hi: Longs, targets: Longs, position: npt.NDArray[np.int32]) -> Layout:
        half_life_days = self.config.time_half_life_days
        return Layout(
            segment_starts=batch.segment_starts,
            lo=lo,
            hi=hi,
            targets=targets,
            time=batch.time.numpy(),
            position=position.astype(np.int64),
            half_life_us=half_life_days * _DAY_US if half_life_days else None,
            distances=self.config.block == "hstu",
        )

    def _flat(
        self, batch: Batch, features: Sequence[str], rng: np.random.Generator | None, tokens: Array | None
    ) -> Array:
        """Return flat rows, [tokens, features] int64, some of them dropped."""
        columns = []
        for name in features:
            local = batch.rows[name].numpy()
            rows = self.row_map.map(name, local if tokens is None else local[tokens])
            if rng is not None and self.config.id_drop_fraction:
                rows = self.row_map.drop(name, rows, self.config.id_drop_fraction, rng)
            columns.append(rows)
        count = batch.num_tokens if tokens is None else len(tokens)
        return np.stack(columns, axis=1) if columns else np.empty((count, 0), np.int64)

    def _states(self, actions: Array, known: Array, is_target: Array) -> Array:
        bit = np.arange(self.num_actions, dtype=np.int32)
        is_known = (known[:, None] >> bit & 1).astype(bool)
        is_set = (actions[:, None] >> bit & 1).astype(bool)
        states = np.empty((len(actions), 3 * self.num_actions + 1), np.float32)
        states[:, 0:-1:3], states[:, 1:-1:3], states[:, 2:-1:3] = is_known & is_set, is_known & ~is_set, ~is_known
        states[is_target] = 0
        states[:, -1] = is_target
        return states

    def _counts(self, items: Array, actions: Array, known: Array, lo: Array, hi: Array, targets: Array) -> Array:
        """Count known and set actions in each target's visible history: all of it, its newest, and by equal feature."""
        width = count_features(self.config, len(self.bits))
        if not width:
            return np.empty((len(targets), 0), np.float32)
        value = _bits(known, self.bits)
        both = np.concatenate([value, value & _bits(actions, self.bits)], axis=1)
        begin, end = lo[targets], hi[targets]
        total = _cumulative(both)
        newest = (ENTRY_TOKENS if self.interleaved else 1) * SHORT_WINDOW
        found = [total[end] - total[begin], total[end] - total[np.maximum(begin, end - newest)]]
        for column, name in enumerate(self.config.item_features):
            rows = items[:, column]
            reserved = rows[targets] < self.row_map.offset[name] + FIRST_FALLBACK_ROW + self.row_map.fallbacks[name]
            match = _matches(rows, both, begin, end, rows[targets])
            match[reserved] = 0
            found.append(match)
        stacked = np.stack(found, axis=1).astype(np.float32)
        num, set_ = np.split(stacked, 2, axis=2)
        parts = [np.log1p(num), np.log1p(set_), set_ / (num + 3.0)]
        return np.concatenate(parts, axis=2).reshape(len(targets), width).astype(np.float32)


def _bits(mask: Array, bits: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return [*, len(bits)] bool of an int32 mask."""
    return (mask[:, None] >> np.asarray(bits, np.int32) & 1).astype(bool)


def _cumulative(values: Array) -> npt.NDArray[np.int64]:
    """Return sums over the first n rows, [n + 1, K]."""
    total = np.zeros((len(values) + 1, values.shape[1]), np.int64)
    np.cumsum(values, axis=0, out=total[1:])
    return total


def _matches(rows: Array, values: Array, begin: Array, end: Array, wanted: Array) -> npt.NDArray[np.int64]:
    """Sum `values` over tokens in [begin, end) whose row is the wanted one, [N, K]; one sort, two binary searches."""
    span = len(rows) + 1
    key = rows * span + np.arange(len(rows))
    order = np.argsort(rows, kind="stable")
    ordered, total = key[order], _cumulative(values[order])
    last = np.searchsorted(ordered, wanted * span + end)
    first = np.searchsorted(ordered, wanted * span + begin)
    return total[last] - total[first]


def _gaps(time: Array, segment_starts: Array, hi: Array, lo: Array, targets: Array) -> Array:
    """Return log-bucketed gaps, half an octave of seconds each; bucket 0: nothing before."""
    gap = np.empty(len(time), np.int64)
    gap[1:] = np.diff(time)
    gap[segment_starts[:-1][segment_starts[:-1] < len(time)]] = -1
    seen = hi[targets] > lo[targets]
    gap[targets] = np.where(seen, time[targets] - time[np.maximum(hi[targets] - 1, 0)], -1)
    bucket = 1 + (2 * np.log2(1.0 + np.maximum(gap, 0) / 1e6)).astype(np.int64)
    return np.where(gap < 0, 0, np.minimum(bucket, NUM_GAPS - 1))
