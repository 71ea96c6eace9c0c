"""Packs whose histories have lost their order and nothing else: what the order of a user's history is worth.

Targets that see the same history [lo, hi) become a segment of their own: that history, then they. What the history
tokens hold (feature rows, actions, known) is permuted among them; time, position, lo and hi stay where they are. So
each target sees the same things as before, as a set, none of which it could not see before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr_core.data.packfile import INDEX_FILE, PACK_FILE, TARGETS_FILE, PackMeta, Segments, write_pack
from gr_core.refs import Bound

Longs = npt.NDArray[np.int64]


def shuffle_pack(source: Path, out: Path, *, seed: int) -> dict[str, Any]:
    """Write the order-shuffled twin of a pack: same role, targets, labels, budget and bound.

    Args:
        source: A pack.
        out: Directory of the new one.
        seed: Seed of the permutations.

    Returns:
        The new pack's index.
    """
    segments, index = read_segments(source)
    meta = PackMeta(
        role=index["role"],
        features=tuple(index["features"]),
        actions=tuple(index["actions"]),
        supervised=index["supervised"],
        tokens=index["tokens"],
        layout=index["layout"],
        grouping=index["grouping"],
        token_budget=index["token_budget"],
        seed=index["seed"],
        vocabulary=index["vocabulary"],
        bound=Bound.from_json(index["bound"]) if index["bound"] else None,
        fingerprint=f"{index['fingerprint']}-shuffled-{seed}",
    )
    return write_pack(out, shuffle_histories(segments, meta.features, np.random.default_rng(seed)), meta)


def read_segments(pack: Path) -> tuple[Segments, dict[str, Any]]:
    """Read a pack back as segments in pack order, lo and hi counted from the segment's first token; and its index."""
    index: dict[str, Any] = json.loads((pack / INDEX_FILE).read_text(encoding="utf-8"))
    table, targets = (_read(pack / name) for name in (PACK_FILE, TARGETS_FILE))
    columns = {name: table.column(name).to_numpy() for name in table.schema.names}
    starts, batch_segments = np.asarray(index["segment_starts"]), np.asarray(index["batch_segments"])
    lengths = np.diff(starts)
    batch_starts = np.repeat(starts[batch_segments[:-1]], np.diff(batch_segments))
    shift = np.repeat(starts[:-1] - batch_starts, lengths).astype(np.int32)
    columns["lo"], columns["hi"] = columns["lo"] - shift, columns["hi"] - shift
    event_ids = targets.column("event_id").combine_chunks()
    return Segments(columns=columns, lengths=lengths, users=index["segment_users"], event_ids=event_ids), index


def shuffle_histories(segments: Segments, features: tuple[str, ...], rng: np.random.Generator) -> Segments:
    """Give each group of targets that sees the same history a segment of its own, its history in random order.

    Args:
        segments: Any segments of the `targets` layout whose targets are all supervised.
        features: Feature columns.
        rng: Draws the permutations.

    Returns:
        Segments in (user, time of the first target) order.

    Raises:
        ValueError: A segment is not history and then supervised targets.
    """
    columns, users = segments.columns, np.asarray(list(segments.users), dtype=str)
    starts = np.concatenate([[0], np.cumsum(segments.lengths)])
    is_target = columns["supervise"] == 1
    segment = np.repeat(np.arange(len(users)), segments.lengths)
    _check_shape(columns, is_target, segment)

    # Targets that follow each other in a segment and see the same [lo, hi) are one group.
    targets = np.flatnonzero(is_target)
    what = np.stack([segment[targets], columns["lo"][targets], columns["hi"][targets]]).astype(np.int64)
    first = np.flatnonzero(np.append(True, (np.diff(what) != 0).any(axis=0))[: len(targets)])
    count = np.diff(np.append(first, len(targets)))
    order = np.lexsort((columns["time"][targets[first]], users[what[0, first]]))
    first, count = first[order], count[order]
    owner, lo, hi = what[:, first]

    group = np.repeat(np.arange(len(first)), hi - lo + count)
    lengths = hi - lo + count
    within = np.arange(len(group)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    seen = (hi - lo)[group]
    is_history = within < seen
    source = np.where(is_history, (starts[owner] + lo)[group] + within, targets[first][group] + within - seen)
    content = _permute_within(source, is_history, group, rng)

    moved = {*features, "actions", "known"}
    new = {name: column[content if name in moved else source] for name, column in columns.items()}
    for name in ("lo", "hi", "position"):
        # History before the group's own is left out; what pointed to it points to the segment's first token.
        new[name] = np.maximum(new[name] - lo[group], 0).astype(np.int32)
    number = np.cumsum(is_target) - 1
    events = segments.event_ids if isinstance(segments.event_ids, pa.Array) else pa.array(list(segments.event_ids))
    return Segments(
        columns=new,
        lengths=lengths,
        users=users[owner].tolist(),
        event_ids=events.take(pa.array(number[source[~is_history]])),
    )


def _check_shape(columns: dict[str, Any], is_target: npt.NDArray[np.bool_], segment: Longs) -> None:
    """Raise ValueError where a history token follows a target, or a target sees what is no history."""
    follows = (segment[1:] == segment[:-1]) & is_target[:-1] & ~is_target[1:]
    if follows.any() or columns["labels"][~is_target].any() or columns["label_known"][~is_target].any():
        raise ValueError("every segment must be history and then supervised targets; some token is neither")


def _permute_within(source: Longs, is_history: npt.NDArray[np.bool_], group: Longs, rng: np.random.Generator) -> Longs:
    """Return `source` with the entries of history tokens permuted within each group."""
    places = np.flatnonzero(is_history)
    drawn = places[np.lexsort((rng.random(len(places)), group[places]))]
    permuted = source.copy()
    permuted[places] = source[drawn]
    return permuted


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as stream:
        return pa.ipc.open_file(stream).read_all()
