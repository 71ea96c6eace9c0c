"""The embedded world as a feed: raw daily files with their faults, the truth behind them, and ready packs.

In: a world (gr_core.data.world) and a day. Out: parquet files below a root, as a real feed would deliver them: rows in
no order, actions as far as they are known when the day ends, rows delivered again when more of them is known, late
events, duplicates, a bot, and rows that break the contract. A file depends on the world and its day alone.
`python -m gr_core.data.synthetic --out DIR` writes packs and a RUN.json for `python -m gr_core.train`.
Needs numpy and pyarrow alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gr_core.atomic import write_whole
from gr_core.data.population import DEVICES, Ints, World, WorldValues, age_days, generator
from gr_core.data.ready_packs import PRESETS, write_packs
from gr_core.data.world import ACTIONS, DAY_MS, NEVER, SURFACES, DayEvents, day_end_ms, events_of

__all__ = ["RAW_SCHEMA", "World", "day_counts", "ensure_day", "main", "truth", "write_packs"]

NUM_PARTS = 2
DUPLICATE_FRACTION = 0.01
"""Share of a day's own events that its file holds twice."""
FAULTS = {"null_user": 3, "null_item": 3, "null_time": 2, "bad_time": 2, "clock_skew": 4}
"""Rows a day that break the contract, by the reason they are quarantined for. They are copies of good rows with an
event id of their own; the last of the clock_skew rows is 400 days ahead, the others 3 to 10 hours."""

RAW_SCHEMA = pa.schema(
    [
        ("event_id", pa.string()),
        ("user_id", pa.string()),
        ("item_id", pa.string()),
        ("request_id", pa.string()),
        ("shown_at", pa.string()),
        ("category", pa.string()),
        ("creator", pa.string()),
        ("surface", pa.string()),
        ("device", pa.string()),
        ("slot", pa.int32()),
        *((action, pa.bool_()) for action in ACTIONS),
        *((f"{action}_ms", pa.int64()) for action in ACTIONS),
    ]
)
"""A raw row. shown_at: UTC as text, %Y-%m-%dT%H:%M:%S%.3f. <action>_ms: when it was taken, ms since the epoch."""


def ensure_day(root: str | Path, world: WorldValues, day: date) -> list[Path]:
    """Write a day's raw files where they are missing.

    Files that are there are left alone, whatever they hold. The bytes of a file depend on the world, the day and the
    pyarrow release alone, not on what was written before.

    Args:
        root: Local directory of the raw files.
        world: Seed, first day and sizes.
        day: The feed day D.

    Returns:
        The day's files, impressions/date=D/part-*.parquet below root; none before the world's first day.
    """
    folder = Path(root) / "impressions" / f"date={day.isoformat()}"
    paths = [folder / f"part-{number}.parquet" for number in range(NUM_PARTS)]
    if age_days(World.of(world), day) < 0:
        return []
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    if missing:
        rows, _ = _file_rows(World.of(world), day)
        folder.mkdir(parents=True, exist_ok=True)
        for number in missing:
            begin, end = (len(rows) * k // NUM_PARTS for k in (number, number + 1))
            write_whole(paths[number], partial(pq.write_table, rows.slice(begin, end - begin)))
    return paths


def day_counts(world: WorldValues, day: date) -> dict[str, int]:
    """Count the rows of a day's files by what they are.

    Returns:
        read: all rows. first: the day's own events, delivered on time, the bot's among them (bot: how many). late:
        events of the two days before, delivered now. again: events delivered before, with an action more. duplicates:
        rows twice in these files. And `FAULTS`. read = first + late + again + duplicates + the faults.
    """
    return _file_rows(World.of(world), day)[1]


def truth(world: WorldValues, day: date) -> pa.Table:
    """Return the true probabilities of a day's events.

    Args:
        world: The world.
        day: The day on which they are shown; late ones count here, however late they are delivered.

    Returns:
        event_id, user_id (text), and per action its probability (float64) when the impression was made, given all
        that had been shown to the user by then.
    """
    events = events_of(World.of(world), day)
    everything = np.arange(len(events))
    return pa.table(
        {
            "event_id": _event_ids(day, everything),
            "user_id": _numbered("u", events.user),
            **{action: events.probability[action] for action in ACTIONS},
        }
    )


def _file_rows(world: World, day: date) -> tuple[pa.Table, dict[str, int]]:
    """Return the rows of a day's files in their order, and their counts."""
    rng = generator(world, "file", day.toordinal())
    end = day_end_ms(day)
    parts, counts = [], {"first": 0, "late": 0, "again": 0, "bot": 0}
    # The longest window is two days, and no event is later than that: older ones bring nothing more.
    for back in (0, 1, 2):
        earlier = date.fromordinal(day.toordinal() - back)
        events = events_of(world, earlier)
        now = events.late_days == back
        fresh = [(ms >= end - DAY_MS) & (ms < end) for ms in events.acted_ms.values()]
        again = (events.late_days < back) & np.logical_or.reduce(fresh)
        parts.append(_rows(events, np.flatnonzero(now | again), end))
        counts["late" if back else "first"] += int(now.sum())
        counts["again"] += int(again.sum())
        if back == 0:
            counts["bot"] = int((events.user == world.num_users).sum())
            own = np.flatnonzero(now)
            twice = np.sort(rng.choice(own, round(DUPLICATE_FRACTION * len(own)), replace=False))
            parts += [_rows(events, twice, end), _faulty(rng, events, end)]
            counts["duplicates"] = len(twice)
    rows = pa.concat_tables(parts)
    counts |= FAULTS | {"read": len(rows)}
    return rows.take(rng.permutation(len(rows))).combine_chunks(), counts


def _rows(events: DayEvents, index: Ints, until_ms: int) -> pa.Table:
    """Return raw rows of some events, with the actions taken before a time."""
    columns: dict[str, Any] = {
        "event_id": _event_ids(events.day, index),
        "user_id": _numbered("u", events.user[index]),
        "item_id": _numbered("i", events.item[index]),
        "request_id": _numbered(f"r{events.day:%Y%m%d}-", events.session[index]),
        "shown_at": _times(events.shown_ms[index]),
        "category": _numbered("c", events.category[index]),
        "creator": _numbered("m", events.creator[index]),
        "surface": pa.array(SURFACES).take(pa.array(events.surface[index])),
        "device": pa.array(DEVICES).take(pa.array(events.device[index])),
        "slot": pa.array(events.slot[index], pa.int32()),
    }
    for action, acted in events.acted_ms.items():
        known = (acted[index] != NEVER) & (acted[index] < until_ms)
        columns[action] = pa.array(known)
        columns[f"{action}_ms"] = pa.array(acted[index], pa.int64(), mask=~known)
    return pa.table(columns, schema=RAW_SCHEMA)


def _faulty(rng: np.random.Generator, events: DayEvents, end_ms: int) -> pa.Table:
    """Return copies of good rows, each spoilt in one way; see `FAULTS`."""
    total = sum(FAULTS.values())
    rows = _rows(events, rng.choice(len(events), total, replace=False), end_ms).to_pydict()
    rows["event_id"] = [f"{events.day:%Y%m%d}-x{number}" for number in range(total)]
    reasons = [reason for reason, count in FAULTS.items() for _ in range(count)]
    ahead = end_ms + rng.integers(3 * 3_600_000, 10 * 3_600_000, total)
    ahead[-1] = end_ms + 400 * DAY_MS
    spoilt = {
        "null_user": ("user_id", [None] * total),
        "null_item": ("item_id", [None] * total),
        "null_time": ("shown_at", [None] * total),
        "bad_time": ("shown_at", ["yesterday"] * total),
        "clock_skew": ("shown_at", _times(ahead).to_pylist()),
    }
    for number, reason in enumerate(reasons):
        column, values = spoilt[reason]
        rows[column][number] = values[number]
    return pa.table(rows, schema=RAW_SCHEMA)


def _event_ids(day: date, index: Ints) -> pa.Array:
    return _numbered(f"{day:%Y%m%d}-", index)


def _numbered(prefix: str, numbers: Ints) -> pa.Array:
    """Return text: the prefix and each number."""
    return pc.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")


def _times(moments_ms: Ints) -> pa.Array:
    """Return ISO times with milliseconds, UTC without a zone."""
    return pa.array(np.datetime_as_string(moments_ms.astype("datetime64[ms]"), unit="ms"), pa.string())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write ready packs and a RUN.json from the command line; prints one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m gr_core.data.synthetic",
        description="Write packs of the embedded world and a RUN.json for python -m gr_core.train.",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write below")
    parser.add_argument("--users", type=int, default=2000, help="users of the train pack (default: %(default)s)")
    parser.add_argument("--items", type=int, default=400, help="items of the catalogue (default: %(default)s)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="world", help="history lengths (default: world)")
    parser.add_argument("--max-history", type=int, help="longest history in tokens (default: the preset's)")
    parser.add_argument("--token-budget", type=int, default=8192, help="tokens a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is other packs (default: %(default)s)")
    options = parser.parse_args(arguments)
    indexes = write_packs(
        options.out,
        World(seed=options.seed, num_items=options.items),
        num_users=options.users,
        preset=options.preset,
        max_history=options.max_history,
        token_budget=options.token_budget,
    )
    keys = ("num_segments", "num_tokens", "num_supervised")
    packs = {role: {key: index[key] for key in keys} for role, index in indexes.items()}
    sys.stdout.write(json.dumps({"run": str(options.out / "RUN.json"), "packs": packs}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
