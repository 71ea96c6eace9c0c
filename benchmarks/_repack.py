"""The same events in another pack: only the newest days, several passes, another layout, grouping or seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks._shuffle import read_segments
from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.hashing import fingerprint
from gr_core.refs import Bound

Longs = npt.NDArray[np.int64]


def repack(
    source: Path, out: Path, *, since_us: int | None = None, until_us: int | None = None, passes: int = 1, **rules: Any
) -> dict[str, Any]:
    """Write a pack of another pack's events.

    Args:
        source: A pack.
        out: Directory of the new one.
        since_us: Targets shown before are left out, with the history that no other target sees; None: all stay.
        until_us: Targets shown at or after it likewise.
        passes: How often every segment stands in the new pack.
        rules: layout, grouping, token_budget, seed where they differ from the source's.

    Returns:
        What a stage says of a pack: uri, digest, num_tokens, num_supervised.
    """
    segments, index = read_segments(source)
    if since_us is not None or until_us is not None:
        segments = between(segments, since_us, until_us)
    names = ("role", "supervised", "tokens", "layout", "grouping", "token_budget", "seed", "vocabulary")
    meta = PackMeta(
        features=tuple(index["features"]),
        actions=tuple(index["actions"]),
        bound=Bound.from_json(index["bound"]) if index["bound"] else None,
        **{name: index[name] for name in names},
    )
    written = write_pack(out, _repeated(segments, passes), replace(meta, **rules))
    return {
        "uri": str(out),
        "digest": fingerprint(written["sha256"]),
        **{key: written[key] for key in ("num_tokens", "num_supervised")},
    }


def between(segments: Segments, since_us: int | None, until_us: int | None = None) -> Segments:
    """Keep targets shown in [since_us, until_us), the history that they see, and no segment without a target.

    A segment then begins where its first target's sight begins, as if it had been built for these targets alone.
    """
    columns, lengths = segments.columns, segments.lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target, time = columns["supervise"] == 1, columns["time"]
    taken = is_target & (time >= (-(2**62) if since_us is None else since_us))
    taken &= time < (2**62 if until_us is None else until_us)
    first, last = np.full(len(lengths), 2**31 - 1), np.zeros(len(lengths), np.int64)
    np.minimum.at(first, owner[taken], columns["lo"][taken])
    np.maximum.at(last, owner[taken], columns["hi"][taken])
    kept = taken | (~is_target & (within >= first[owner]) & (within < last[owner]))
    new = {name: column[kept] for name, column in columns.items()}
    shift = first[owner[kept]]
    for name in ("lo", "hi", "position"):
        new[name] = np.maximum(new[name] - shift, 0).astype(np.int32)
    counts = np.bincount(owner[kept], minlength=len(lengths))
    has = np.flatnonzero(counts)
    users = np.asarray(list(segments.users), dtype=str)
    return Segments(
        columns=new,
        lengths=counts[has],
        users=users[has].tolist(),
        event_ids=pa.array(segments.event_ids).take(pa.array(np.flatnonzero(taken[is_target]))),
    )


def _repeated(segments: Segments, passes: int) -> Segments:
    if passes == 1:
        return segments
    return Segments(
        columns={name: np.tile(column, passes) for name, column in segments.columns.items()},
        lengths=np.tile(segments.lengths, passes),
        users=list(segments.users) * passes,
        event_ids=pa.concat_arrays([segments.event_ids] * passes),
    )
