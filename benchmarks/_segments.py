"""Segments of the presets' lengths with meaningless content: what packing and loading are measured on.

In: a preset and how many tokens. Out: ragged arrays as `packfile.Segments`: history, then one session's targets that see
all of it. Content is random, since what it says costs nothing; lengths, types and intervals are those of a night.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.data.packfile import Segments
from gr_core.data.ready_packs import PRESETS
from gr_core.schema import pack_schema

FEATURES = ("item_id", "category", "creator", "surface", "slot", "device")
ACTIONS = ("click", "like", "purchase")
SESSION = 10
"""Targets of a segment; the preset's lengths are those of the history."""
_MINUTE_US = 60_000_000


def segments_of(preset: str, num_tokens: int, seed: int = 0) -> Segments:
    """Return about so many tokens in segments of a preset's lengths, one segment a user.

    Args:
        preset: A key of ready_packs.PRESETS.
        num_tokens: About how many tokens in all.
        seed: Another one is other segments.
    """
    shape = PRESETS[preset]
    rng = np.random.default_rng(seed)
    # Twice the tokens that this many users are likely to have, then as many users as are wanted.
    drawn = max(2 * num_tokens // max(round(shape.longest * shape.median_fraction), 1), 8)
    wanted = shape.longest * shape.median_fraction * np.exp(rng.normal(0, shape.sigma, drawn))
    history = np.minimum(wanted, shape.longest).astype(np.int64)
    lengths = history + SESSION
    count = min(int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1, drawn)
    history, lengths = history[:count], lengths[:count]
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    end = np.repeat(history, lengths)
    return Segments(
        columns=_columns(rng, within, end),
        lengths=lengths,
        users=[f"u{number}" for number in range(count)],
        event_ids=pa.array(np.arange(count * SESSION)).cast(pa.string()),
    )


def _columns(
    rng: np.random.Generator, within: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the pack's columns, given each token's place in its segment and the length of its history."""
    target = within >= end
    size = len(within)
    values = {name: rng.integers(0, 1 << 20, size, np.int32) for name in FEATURES}
    bits = rng.integers(0, 1 << len(ACTIONS), size, np.int32)
    values |= {
        "actions": np.where(target, 0, bits),
        "known": np.where(target, 0, (1 << len(ACTIONS)) - 1),
        "labels": np.where(target, bits, 0),
        "label_known": np.where(target, (1 << len(ACTIONS)) - 1, 0),
        "time": within * _MINUTE_US,
        "position": np.minimum(within, end),
        "lo": np.zeros(size),
        "hi": np.minimum(within, end),
        "supervise": target,
        "weight": np.ones(size),
    }
    kinds = {field.name: field.type.to_pandas_dtype() for field in pack_schema(FEATURES)}
    return {name: np.ascontiguousarray(value, kinds[name]) for name, value in values.items()}
