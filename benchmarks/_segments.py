"""Ragged arrays of the presets' lengths with meaningless content: what packing and loading are measured on.

In: a preset and how many tokens. Out: one bucket's sequences (`ragged.Ragged`) with the embedding rows of its codes.
Content is random, since what it says costs nothing; lengths, types and intervals are those of a night.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from benchmarks._padding import lengths_of
from gr_core.data.ragged import BITS, FIRST_CODE, HI, KNOWN, LO, WORDS, Ints, Longs, Ragged, RaggedSource, ranges, width
from gr_core.schema import FIRST_FALLBACK_ROW

FEATURES = ("item_id", "category", "creator", "surface", "slot", "device")
ACTIONS = ("click", "like", "purchase")
SESSION = 10
"""Most targets of a segment; they are part of the preset's length and see all of its history."""
_DISTINCT = 100_000  # ids a feature
_ZIPF = 1.05
_MINUTE_US = 60_000_000
_ROLE = 1


def source_of(
    preset: str, num_tokens: int, seed: int = 0, *, rows: Mapping[str, int] | None = None, days: int = 1
) -> RaggedSource:
    """Return about so many tokens in segments of a preset's lengths, one segment a user.

    Args:
        preset: A key of _padding.PRESETS.
        num_tokens: About how many tokens in all.
        seed: Another one is other segments.
        rows: Real rows of each feature's table, drawn by Zipf's law; None: all ids equally likely.
        days: How many sessions of targets a segment has, behind the same history; more than one make it longer than the
            preset says.
    """
    lengths = lengths_of(preset, max(num_tokens // 8, 8), seed)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    rng = np.random.default_rng(seed)
    first = FIRST_CODE if rows is None else FIRST_FALLBACK_ROW + 1
    tables = {
        name: np.append(np.arange(FIRST_CODE), first + _rows(rng, None if rows is None else rows[name])).astype(
            np.int32
        )
        for name in FEATURES
    }
    return RaggedSource([_ragged(rng, lengths, days)], [tables], _ROLE)


def _rows(rng: np.random.Generator, num_rows: int | None) -> Longs:
    """Return the row of each code, [_DISTINCT], from 0; a code is as likely as another, so a row is by how many it has."""
    if num_rows is None:
        return rng.permutation(_DISTINCT)
    return zipf(rng, num_rows, _DISTINCT)


def zipf(rng: np.random.Generator, num_rows: int, size: int) -> Longs:
    """Draw rows below `num_rows` with probability falling as rank to the power of -1.05; ranks are shuffled rows."""
    share = np.arange(1, num_rows + 1, dtype=np.float64) ** -_ZIPF
    ranks = np.searchsorted(np.cumsum(share) / share.sum(), rng.random(size), side="right")
    return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


def _ragged(rng: np.random.Generator, lengths: Longs, days: int) -> Ragged:
    targets = np.minimum(SESSION, lengths)
    history = lengths - targets
    targets = targets * days
    lengths = history + targets
    begin = np.cumsum(history) - history
    past = int(history.sum())
    rows = np.empty((int(lengths.sum()), width(len(FEATURES))), np.int32)
    rows[:, WORDS:] = rng.integers(FIRST_CODE, FIRST_CODE + _DISTINCT, (len(rows), rows.shape[1] - WORDS), np.int32)
    rows[:, BITS] = rng.integers(0, 1 << len(ACTIONS), len(rows), np.int32)
    rows[:, KNOWN] = (1 << len(ACTIONS)) - 1
    rows[:, LO] = np.append(np.repeat(begin, history), np.repeat(begin, targets))
    rows[:, HI] = np.append(np.arange(past), np.repeat(begin + history, targets))
    time = np.append(ranges(np.zeros(len(lengths), np.int64), history), ranges(history, targets)) * _MINUTE_US
    rows[:, :BITS] = np.ascontiguousarray(time).view(np.int32).reshape(-1, BITS)
    return Ragged(
        features=FEATURES,
        rows=rows,
        num_history=past,
        user=_ints(np.arange(len(lengths))),
        roles=np.full(len(lengths), _ROLE, np.uint8),
        begin=begin,
        history=_ints(history),
        target=past + np.cumsum(targets) - targets,
        targets=_ints(targets),
        users=pa.array([f"u{number:09d}" for number in range(len(lengths))], pa.large_string()),
        event_ids=pa.array(np.arange(int(targets.sum()))).cast(pa.large_string()),
    )


def _ints(values: Longs) -> Ints:
    return values.astype(np.int32)
