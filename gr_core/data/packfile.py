"""Pack files: segments become batches, batches become one memory-mappable Arrow file with an index.

In: a `Source` of segments: flat columns in memory (`Segments`), or buckets' files (gr_core.data.ragged). Out: a directory
with pack.arrow (uncompressed Arrow IPC file, one record batch per training batch), targets.arrow (event and user of every
supervised token) and index.json, written last. Tokens pass through a few batches at a time, so memory does not grow with
the pack. Needs numpy and pyarrow alone, so that a bare GPU machine can write packs.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gr_core.data.planning import PlanRules, plan
from gr_core.data.ragged import ranges
from gr_core.errors import ConfigError
from gr_core.hashing import file_sha256
from gr_core.refs import Bound
from gr_core.schema import PACK_FORMAT, REPLAYED, pack_schema

PACK_FILE = "pack.arrow"
TARGETS_FILE = "targets.arrow"
INDEX_FILE = "index.json"
# Tokens gathered at a time: enough to make Python's share small, few enough to stay in the cache.
CHUNK_TOKENS = 1 << 15

Column = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]


class Source(Protocol):
    """Segments in any order; those of one user in the order of their first targets."""

    @property
    def lengths(self) -> Longs:
        """Tokens of each segment, [S]."""

    @property
    def users(self) -> Any:
        """User of each segment, [S]: a sequence of text or a pyarrow array."""

    def take(self, segments: Longs) -> tuple[dict[str, Column], Any]:
        """Return the tokens of some segments, end to end in the order asked for.

        Args:
            segments: Segment numbers.

        Returns:
            Every column of `schema.pack_schema(features)` with segment-relative lo and hi; the event of each token with
            supervise != 0, in token order, as a pyarrow array of text.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Segments end to end in memory: a `Source`."""

    columns: dict[str, Column]
    """Every column of `schema.pack_schema(features)`, [T] each, no nulls; lo and hi are SEGMENT-relative."""
    lengths: Longs
    """Tokens of each segment, [S]; the sum is T."""
    users: Sequence[str]
    """User of each segment, [S]. Segments of one user stand in the order of their first targets."""
    event_ids: Any
    """Event of each token with supervise != 0, in token order: a sequence of text or a pyarrow array."""
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def take(self, segments: Longs) -> tuple[dict[str, Column], Any]:
        """See `Source.take`."""
        if not self._cache:
            # What every call needs, made by the first: nobody changes a column once the writing has begun.
            is_target = self.columns["supervise"] != 0
            self._cache["starts"] = np.append(0, np.cumsum(self.lengths))
            self._cache["targets"] = np.append(0, np.cumsum(is_target))
            self._cache["event_ids"] = _text(self.event_ids)
        starts, targets = self._cache["starts"], self._cache["targets"]
        place = ranges(starts[segments], self.lengths[segments])
        first = targets[starts[segments]]
        events = ranges(first, targets[starts[segments + 1]] - first)
        columns = {name: values.take(place) for name, values in self.columns.items()}
        return columns, self._cache["event_ids"].take(pa.array(events))

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
    negative_fraction: float = 1.0
    """Share of the labels 0 that stand in the pack (gr_core.data.sampling); training corrects the logits by it."""


def write_pack(out: Path, segments: Source, meta: PackMeta) -> dict[str, Any]:
    """Make batches of segments and write the pack.

    The result depends on the segments' content and on `meta` alone, never on the order in which users come. No batch
    exceeds the token budget or holds two segments of one user. Targets whose label_known is 0 are
    kept as tokens but are not supervised (example 6).

    Args:
        out: Directory, made if missing; an earlier pack there stops being one before its rows are replaced.
        segments: The tokens.
        meta: Role, names, budget, seed and what else the index records.

    Returns:
        The index, as written to index.json.

    Raises:
        ConfigError: A segment is longer than the token budget.
        ValueError: Columns, lengths, users or event_ids do not fit each other.
    """
    if isinstance(segments, Segments):
        _check(segments, pack_schema(meta.features))
    lengths, users = segments.lengths, _text(segments.users)
    _check_meta(lengths, meta)
    train = meta.role == "train"
    # The judged roles are shuffled too, but by no seed: a heavy user's segments, side by side, would share no batch.
    rules = PlanRules(
        token_budget=meta.token_budget,
        layout=meta.layout,
        grouping=meta.grouping,
        seed=meta.seed if train else 0,
        shuffle_batches=train,
    )
    order, batch_segments = plan(lengths, _rank(users), rules)
    starts = np.append(0, np.cumsum(lengths[order]))
    ordered = users.take(pa.array(order))

    out.mkdir(parents=True, exist_ok=True)
    (out / INDEX_FILE).unlink(missing_ok=True)
    tally = _Tally(len(order), causal=meta.tokens == "interleaved")
    with _Writer(out, meta.features) as writer:
        for first, last in _chunks(starts[batch_segments]):
            bounds = batch_segments[first : last + 1]
            chunk = order[bounds[0] : bounds[-1]]
            columns, event_ids = segments.take(chunk)
            supervised = tally.add(columns, lengths[chunk], int(bounds[0]))
            writer.batches(columns, starts[bounds[0] : bounds[-1] + 1], bounds - bounds[0])
            writer.targets(event_ids, ordered, supervised, bounds)

    index = {
        "num_tokens": int(starts[-1]),
        "num_segments": len(order),
        "num_targets": tally.num_targets,
        "num_supervised": tally.num_supervised,
        **({"num_replayed": tally.num_replayed} if tally.num_replayed else {}),
        "segment_starts": starts.tolist(),
        "segment_users": ordered.to_pylist(),
        "batch_segments": batch_segments.tolist(),
        "batch_tokens": np.diff(starts[batch_segments]).tolist(),
        "batch_weights": tally.weights(batch_segments),
        **({"segment_causal": tally.causal.tolist()} if tally.causal is not None else {}),
        **_described(meta),
        "sha256": {name: file_sha256(out / name) for name in (PACK_FILE, TARGETS_FILE)},
    }
    temporary = out / f".tmp-{INDEX_FILE}"
    temporary.write_text(json.dumps(index) + "\n", encoding="utf-8")
    os.replace(temporary, out / INDEX_FILE)
    return index


def _described(meta: PackMeta) -> dict[str, Any]:
    """Return the part of the index that does not depend on the segments."""
    return {
        "format": PACK_FORMAT,
        "tokens": meta.tokens,
        "role": meta.role,
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
        **({"negative_fraction": meta.negative_fraction} if meta.negative_fraction < 1.0 else {}),
    }


@dataclass(frozen=True, slots=True)
class _Supervised:
    """The supervised tokens of a chunk."""

    event: Longs
    """Place of each among the chunk's targets, ascending."""
    segment: Longs
    """Its segment in the pack."""


class _Tally:
    """Sums over the segments of a pack, filled chunk by chunk: the loss denominators and counts."""

    def __init__(self, num_segments: int, *, causal: bool) -> None:
        self.num_targets = self.num_supervised = self.num_replayed = 0
        self.causal = np.zeros(num_segments, np.bool_) if causal else None
        """Whether each token of a segment sees exactly what stands before it, so that plain causal attention is the same."""
        self._tokens = np.zeros(num_segments, np.float64)
        self._weight = np.zeros(num_segments, np.float64)

    def add(self, columns: dict[str, Column], lengths: Longs, first_segment: int) -> _Supervised:
        """Count a chunk; `supervise` stays set only where a label is known."""
        target = np.flatnonzero(columns["supervise"] != 0)
        event = np.flatnonzero(columns["label_known"].take(target) != 0)
        token = target[event]
        flags = columns["supervise"].take(token)
        columns["supervise"] = np.zeros(len(columns["supervise"]), np.uint8)
        columns["supervise"][token] = flags
        place = slice(first_segment, first_segment + len(lengths))
        if self.causal is not None:
            plain = (columns["lo"] == 0) & (columns["hi"] == columns["position"])
            self.causal[place] = np.logical_and.reduceat(plain, np.cumsum(lengths) - lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths).take(token)
        self._tokens[place] = np.bincount(owner, minlength=len(lengths))
        weights = columns["weight"].take(token).astype(np.float64)
        self._weight[place] = np.bincount(owner, weights=weights, minlength=len(lengths))
        self.num_targets += len(target)
        replayed = int(np.count_nonzero(flags == REPLAYED))
        self.num_supervised += len(token) - replayed
        self.num_replayed += replayed
        return _Supervised(event, owner + first_segment)

    def weights(self, batch_segments: Longs) -> dict[str, list[float]]:
        """Return each batch's sum of w_t per normalisation: the loss denominators (example 6)."""
        # n tokens of weight 1/n are exactly 1.
        per_segment = {
            "token": self._tokens,
            "segment": (self._tokens > 0).astype(np.float64),
            "event_weight": self._weight,
        }
        begins = batch_segments[:-1]
        return {
            name: np.add.reduceat(values, begins).tolist() if len(begins) else []
            for name, values in per_segment.items()
        }


class _Writer:
    """The two Arrow files of a pack, open for batches."""

    def __init__(self, out: Path, features: Sequence[str]) -> None:
        self._schema = pack_schema(features)
        self._targets = pa.schema([("event_id", pa.string()), ("user_id", pa.string())])
        self._sinks = [pa.OSFile(str(out / name), "wb") for name in (PACK_FILE, TARGETS_FILE)]
        schemas = (self._schema, self._targets)
        self._writers = [pa.ipc.new_file(sink, schema) for sink, schema in zip(self._sinks, schemas, strict=True)]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        for file in [*(self._writers if kind is None else ()), *self._sinks]:
            file.close()

    def batches(self, columns: dict[str, Column], starts: Longs, cuts: Longs) -> None:
        """Write one record batch a training batch; lo and hi become batch-relative.

        Args:
            columns: Tokens of whole batches.
            starts: Where their segments begin in the pack, and the end of the last, [S + 1].
            cuts: Boundaries of the batches in the segments, [B + 1].
        """
        batch_starts = starts[cuts]
        shift = np.repeat(starts[:-1] - np.repeat(batch_starts[:-1], np.diff(cuts)), np.diff(starts)).astype(np.int32)
        values = {
            item.name: columns[item.name].astype(item.type.to_pandas_dtype(), copy=False) for item in self._schema
        }
        values |= {name: values[name] + shift for name in ("lo", "hi")}
        for begin, end in itertools.pairwise((batch_starts - starts[0]).tolist()):
            # Not slices of one Arrow batch: those are written with their neighbours' bytes as padding.
            arrays = [pa.array(column[begin:end]) for column in values.values()]
            self._writers[0].write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def targets(self, event_ids: Any, users: Any, supervised: _Supervised, bounds: Longs) -> None:
        """Write the events and users of supervised tokens, one record batch a training batch.

        Args:
            event_ids: Events of the chunk's targets.
            users: User of every segment of the pack.
            supervised: Which of the targets, and whose.
            bounds: Boundaries of the chunk's batches in the pack's segments, [B + 1].
        """
        for begin, end in itertools.pairwise(np.searchsorted(supervised.segment, bounds).tolist()):
            places = (event_ids, supervised.event), (users, supervised.segment)
            columns = [texts.take(pa.array(place[begin:end])).cast(pa.string()) for texts, place in places]
            self._writers[1].write_batch(pa.RecordBatch.from_arrays(columns, schema=self._targets))


def _chunks(batch_starts: Longs) -> Iterator[tuple[int, int]]:
    """Yield (first, last) batches of about CHUNK_TOKENS tokens."""
    at, end = 0, len(batch_starts) - 1
    while at < end:
        after = int(np.searchsorted(batch_starts, batch_starts[at] + CHUNK_TOKENS, side="right")) - 1
        after = min(max(after, at + 1), end)
        yield at, after
        at = after


def _rank(users: Any) -> Longs:
    """Return the place of each segment's user among the distinct users in text order, [S]."""
    coded = users.dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return np.asarray(rank.take(coded.indices.to_numpy()))


def _text(values: Any) -> Any:
    """Return a pyarrow array of any sequence of text."""
    return values if isinstance(values, pa.Array) else pa.array(list(values), pa.string())


def _bound(bound: Bound | None) -> dict[str, Any] | None:
    return None if bound is None else {**bound.to_json(), "cutoff": bound.cutoff}


def _check_meta(lengths: Longs, meta: PackMeta) -> None:
    longest = int(lengths.max(initial=0))
    if longest > meta.token_budget:
        raise ConfigError(
            f"pack.token_budget must hold the longest segment, {longest} tokens, got {meta.token_budget}; raise it or "
            "lower sequences.max_history and sequences.max_targets",
            where="pack.token_budget",
        )


def _check(segments: Segments, schema: pa.Schema) -> None:
    missing = [name for name in schema.names if name not in segments.columns]
    if missing:
        raise ValueError(f"segments must have the columns {schema.names}, missing {missing}")
    num_tokens = segments.num_tokens
    uneven = {name: len(segments.columns[name]) for name in schema.names if len(segments.columns[name]) != num_tokens}
    if uneven:
        raise ValueError(f"every column must have sum(lengths) = {num_tokens} tokens, got {uneven}")
    if len(segments.users) != len(segments.lengths):
        raise ValueError(f"{len(segments.lengths)} segments need as many users, got {len(segments.users)}")
    num_targets = int(np.count_nonzero(segments.columns["supervise"]))
    if len(segments.event_ids) != num_targets:
        raise ValueError(
            f"{num_targets} tokens with supervise != 0 need as many event_ids, got {len(segments.event_ids)}"
        )
