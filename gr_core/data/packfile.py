"""Pack files: segments become batches, batches become one memory-mappable Arrow file with an index.

In: `Segments` (flat token columns, lo and hi counted from the segment's first token). Out: a directory with pack.arrow
(uncompressed Arrow IPC file, one record batch per training batch), targets.arrow (event and user of every supervised
token) and index.json, written last. Needs numpy and pyarrow alone, so that a bare GPU machine can write packs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.errors import ConfigError
from gr_core.hashing import file_sha256
from gr_core.refs import Bound
from gr_core.schema import PACK_FORMAT, pack_schema

PACK_FILE = "pack.arrow"
TARGETS_FILE = "targets.arrow"
INDEX_FILE = "index.json"
# Batches that may still take a segment. At 8192 tokens and segments of at most 192, 16 leave under 0.5 % unused.
OPEN_BATCHES = 16

Column = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Segments end to end, in any order; what `write_pack` makes batches of."""

    columns: dict[str, Column]
    """Every column of `schema.pack_schema(features)`, [T] each, no nulls; lo and hi are SEGMENT-relative."""
    lengths: Longs
    """Tokens of each segment, [S]; the sum is T."""
    users: Sequence[str]
    """User of each segment, [S]. Segments of one user stand in the order of their first targets."""
    event_ids: Any
    """Event of each token with supervise = 1, in token order: a sequence of text or a pyarrow array."""

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.lengths.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class PackMeta:
    """What the index says about a pack besides its rows."""

    role: Literal["train", "next_day", "holdout"]
    """train packs are shuffled by `seed`; the others keep one order whatever the seed, and are never trained on."""
    features: tuple[str, ...]
    """Feature columns in table order."""
    actions: tuple[str, ...]
    """Action names in bit order."""
    supervised: int
    """Bit mask of the actions that are trained and evaluated."""
    tokens: Literal["targets", "interleaved"] = "targets"
    layout: Literal["packed", "padded"] = "packed"
    """padded: a batch holds at most token_budget tokens after every segment is padded to the longest."""
    grouping: Literal["none", "sorted", "bucketed"] = "none"
    """sorted: batches of like lengths; bucketed: lengths within a factor of two."""
    token_budget: int
    """Most tokens of a batch."""
    seed: int = 0
    vocabulary: str = ""
    """Version of the vocabulary that the rows come from."""
    bound: Bound | None = None
    fingerprint: str = ""


def concat_segments(parts: Sequence[Segments]) -> Segments:
    """Put the segments of several buckets end to end.

    Args:
        parts: At least one; all with the same columns.

    Returns:
        One `Segments` in the given order.

    Raises:
        ValueError: No part is given.
    """
    if not parts:
        raise ValueError("concat_segments needs at least one part; write a pack of an empty bucket instead")
    return Segments(
        columns={name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        lengths=np.concatenate([part.lengths for part in parts]),
        users=[user for part in parts for user in part.users],
        event_ids=pa.concat_arrays([_text(part.event_ids) for part in parts]),
    )


def write_pack(out: Path, segments: Segments, meta: PackMeta) -> dict[str, Any]:
    """Make batches of segments and write the pack.

    The result depends on the segments' content and on `meta` alone, never on the order in which users come. No batch
    exceeds the token budget or holds two segments of one user. Tokens with supervise = 1 whose label_known is 0 are
    kept as tokens but are not supervised (example 6).

    Args:
        out: Directory, made if missing; an earlier pack there stops being one before its rows are replaced.
        segments: The tokens.
        meta: Role, names, budget, seed and what else the index records.

    Returns:
        The index, as written to index.json.

    Raises:
        ConfigError: A segment is longer than the token budget, or `tokens` is not "targets".
        ValueError: Columns, lengths, users or event_ids do not fit each other.
    """
    schema = pack_schema(meta.features)
    _check(segments, meta, schema)
    order, batch_segments = _plan(segments, meta)
    columns, event_ids, starts = _gather(segments, order, batch_segments, schema)
    users = [segments.users[i] for i in order]
    supervised = columns["supervise"] == 1
    token_segment = np.repeat(np.arange(len(order)), np.diff(starts))

    out.mkdir(parents=True, exist_ok=True)
    (out / INDEX_FILE).unlink(missing_ok=True)
    batch_starts = starts[batch_segments]
    _write_batches(out / PACK_FILE, columns, batch_starts, schema)
    target_users = pa.array(users, pa.string()).take(pa.array(token_segment[supervised]))
    targets = pa.table({"event_id": event_ids, "user_id": target_users})
    _write_table(out / TARGETS_FILE, targets)

    index = {
        "format": PACK_FORMAT,
        "tokens": meta.tokens,
        "role": meta.role,
        "num_tokens": int(starts[-1]),
        "num_segments": len(order),
        "num_targets": int(segments.columns["supervise"].sum(dtype=np.int64)),
        "num_supervised": int(supervised.sum()),
        "segment_starts": starts.tolist(),
        "segment_users": users,
        "batch_segments": batch_segments.tolist(),
        "batch_tokens": np.diff(batch_starts).tolist(),
        "batch_weights": _weights(columns["weight"], supervised, token_segment, starts, batch_segments),
        "vocabulary": meta.vocabulary,
        "bound": _bound(meta.bound),
        "fingerprint": meta.fingerprint,
        "features": list(meta.features),
        "actions": list(meta.actions),
        "supervised": meta.supervised,
        "layout": meta.layout,
        "grouping": meta.grouping,
        "token_budget": meta.token_budget,
        "seed": meta.seed,
        "sha256": {name: file_sha256(out / name) for name in (PACK_FILE, TARGETS_FILE)},
    }
    temporary = out / f".tmp-{INDEX_FILE}"
    temporary.write_text(json.dumps(index) + "\n", encoding="utf-8")
    os.replace(temporary, out / INDEX_FILE)
    return index


def _text(values: Any) -> Any:
    """Return a pyarrow string array of any sequence of text."""
    array = values if isinstance(values, pa.Array) else pa.array(list(values), pa.string())
    return array.cast(pa.string())


def _bound(bound: Bound | None) -> dict[str, Any] | None:
    return None if bound is None else {**bound.to_json(), "cutoff": bound.cutoff}


def _check(segments: Segments, meta: PackMeta, schema: pa.Schema) -> None:
    if meta.tokens != "targets":
        raise ConfigError(
            f'pack.tokens must be "targets" in this release, got {meta.tokens!r}; set pack.tokens = "targets"',
            where="pack.tokens",
        )
    missing = [name for name in schema.names if name not in segments.columns]
    if missing:
        raise ValueError(f"segments must have the columns {schema.names}, missing {missing}")
    num_tokens = segments.num_tokens
    uneven = {name: len(segments.columns[name]) for name in schema.names if len(segments.columns[name]) != num_tokens}
    if uneven:
        raise ValueError(f"every column must have sum(lengths) = {num_tokens} tokens, got {uneven}")
    if len(segments.users) != len(segments.lengths):
        raise ValueError(f"{len(segments.lengths)} segments need as many users, got {len(segments.users)}")
    num_targets = int(segments.columns["supervise"].sum(dtype=np.int64))
    if len(segments.event_ids) != num_targets:
        raise ValueError(
            f"{num_targets} tokens with supervise = 1 need as many event_ids, got {len(segments.event_ids)}"
        )
    longest = int(segments.lengths.max(initial=0))
    if longest > meta.token_budget:
        raise ConfigError(
            f"pack.token_budget must hold the longest segment, {longest} tokens, got {meta.token_budget}; raise it or "
            "lower sequences.max_history and sequences.max_targets",
            where="pack.token_budget",
        )


def _plan(segments: Segments, meta: PackMeta) -> tuple[Longs, Longs]:
    """Choose the order of segments and the batch boundaries.

    Returns:
        order [S]: segment numbers in pack order; batch_segments [B + 1]: boundaries in it.
    """
    users = np.asarray(list(segments.users), dtype=object)
    user_of = np.unique(users.astype(str), return_inverse=True)[1].reshape(-1) if len(users) else np.empty(0, np.int64)
    # Canonical first: by user, then as given, so that the cut into buckets cannot show.
    canonical = np.argsort(user_of, kind="stable")
    # The judged roles are shuffled too: a heavy user's segments, side by side, would need an open batch each.
    rng = np.random.default_rng(meta.seed if meta.role == "train" else 0)
    order = canonical[rng.permutation(len(canonical))]
    if meta.grouping != "none":
        lengths = segments.lengths[order]
        key = lengths if meta.grouping == "sorted" else np.ceil(np.log2(np.maximum(lengths, 1)))
        order = order[np.argsort(key, kind="stable")]
    batches = _first_fit(segments.lengths[order], user_of[order], meta)
    if meta.grouping != "none" and meta.role == "train":
        # Only what a batch holds follows the lengths, never when it comes.
        batches = [batches[i] for i in rng.permutation(len(batches))]
    picked = np.asarray([i for batch in batches for i in batch], dtype=np.int64)
    boundaries = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
    return order[picked], boundaries


def _first_fit(lengths: Longs, user_of: Longs, meta: PackMeta) -> list[list[int]]:
    """Put each segment into the first open batch with room and without its user; O(S * OPEN_BATCHES)."""
    budget, padded = meta.token_budget, meta.layout == "padded"
    batches: list[list[int]] = []
    members: list[set[int]] = []
    used: list[int] = []
    longest: list[int] = []
    open_batches: list[int] = []
    for i, (length, user) in enumerate(zip(lengths.tolist(), user_of.tolist(), strict=True)):
        for b in open_batches:
            after = max(longest[b], length) * (len(batches[b]) + 1) if padded else used[b] + length
            if after <= budget and user not in members[b]:
                break
        else:
            if len(open_batches) == OPEN_BATCHES:
                open_batches.remove(max(open_batches, key=used.__getitem__))
            b = len(batches)
            batches.append([])
            members.append(set())
            used.append(0)
            longest.append(0)
            open_batches.append(b)
            after = length
        batches[b].append(i)
        members[b].add(user)
        used[b] = after
        longest[b] = max(longest[b], length)
    return batches


def _gather(
    segments: Segments, order: Longs, batch_segments: Longs, schema: pa.Schema
) -> tuple[dict[str, Column], Any, Longs]:
    """Bring tokens and event ids into pack order; lo and hi become batch-relative.

    Returns:
        The columns [T] in the schema's types, the supervised tokens' event ids, segment starts [S + 1].
    """
    source_starts = np.concatenate([[0], np.cumsum(segments.lengths)])
    lengths = segments.lengths[order]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    source = np.repeat(source_starts[order], lengths) + within
    columns = {
        field.name: segments.columns[field.name][source].astype(field.type.to_pandas_dtype(), copy=False)
        for field in schema
    }
    batch_of_segment = np.repeat(np.arange(len(batch_segments) - 1), np.diff(batch_segments))
    shift = np.repeat(starts[:-1] - starts[batch_segments[batch_of_segment]], lengths).astype(np.int32)
    columns["lo"] += shift
    columns["hi"] += shift

    targets = columns["supervise"] == 1
    labelled = targets & (columns["label_known"] != 0)
    number = np.cumsum(segments.columns["supervise"] == 1) - 1
    event_ids = _text(segments.event_ids).take(pa.array(number[source[labelled]]))
    columns["supervise"] = labelled.astype(np.uint8)
    return columns, event_ids, starts


def _weights(
    weight: Column, supervised: npt.NDArray[np.bool_], token_segment: Longs, starts: Longs, batch_segments: Longs
) -> dict[str, list[float]]:
    """Return each batch's sum of w_t per normalisation: the loss denominators (example 6)."""
    num_segments = len(starts) - 1
    per_segment = {
        "token": np.bincount(token_segment[supervised], minlength=num_segments).astype(np.float64),
        "event_weight": np.bincount(
            token_segment[supervised], weights=weight[supervised].astype(np.float64), minlength=num_segments
        ),
    }
    # n tokens of weight 1/n are exactly 1.
    per_segment["segment"] = (per_segment["token"] > 0).astype(np.float64)
    num_batches = len(batch_segments) - 1
    batch_of = np.repeat(np.arange(num_batches), np.diff(batch_segments))
    return {
        name: np.bincount(batch_of, weights=per_segment[name], minlength=num_batches).tolist()
        for name in ("token", "segment", "event_weight")
    }


def _write_batches(path: Path, columns: dict[str, Column], batch_starts: Longs, schema: pa.Schema) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for begin, end in zip(batch_starts[:-1].tolist(), batch_starts[1:].tolist(), strict=True):
            arrays = [pa.array(columns[field.name][begin:end], field.type) for field in schema]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
