"""Sequences of random worlds: each target sees what was there as of its shown_at, in any order and on any threads."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.sequences import ACTIONS, TIME, US, Decoded, build, table


def world(seed: int, num_users: int, num_events: int) -> pl.DataFrame:
    """Random events: sessions with equal times, late and untimed actions, unknown bits, some events due."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_events):
        shown = int(rng.integers(0, 400)) * 10
        visible = shown + int(rng.integers(0, 3)) * 25
        taken = {
            name: (None if rng.random() < 0.3 else shown + int(rng.integers(0, 12)) * 10)
            for name in ACTIONS
            if rng.random() < 0.5
        }
        rows.append(
            {
                "id": f"e{rng.integers(0, 10**6)}-{i}",
                "user": f"u{rng.integers(0, num_users)}",
                "item": f"i{rng.integers(0, 30)}",
                "shown": shown,
                "visible": visible,
                "taken": taken,
                "known": int(rng.integers(0, 4)),
                "surface": [None, "home", "feed"][rng.integers(0, 3)],
                "due": int(rng.integers(0, 4)) if rng.random() < 0.5 else 0,
            }
        )
    return table(rows)


def as_of(events: pl.DataFrame, event_id: str) -> pl.DataFrame:
    """Return what was in the raw rows and actions strictly before a target was shown, and the target's own row."""
    moment = pl.lit(events.filter(event_id=event_id)["shown_at"].item(), TIME)
    itself = pl.col("event_id") == event_id
    seen = events.filter((pl.col("shown_at") < moment) | itself)
    for bit, name in enumerate(ACTIONS):
        at = pl.col(f"{name}_at")
        gone = itself | (at.is_not_null() & (at >= moment))
        seen = seen.with_columns(
            actions=pl.when(gone).then(pl.col("actions") & (0b11 ^ (1 << bit))).otherwise("actions"),
            **{f"{name}_at": pl.when(gone).then(None).otherwise(at)},
        )
    return seen.with_columns(known=pl.when(itself).then(0).otherwise("known").cast(pl.Int32))


def rows_of(built: Decoded) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """Return (history, targets) of each segment."""
    parts, start = [], 0
    for _, length, num_targets in built.segments.rows():
        segment = built.tokens.slice(start, length)
        parts.append((segment.head(length - num_targets), segment.tail(num_targets)))
        start += length
    return parts


@pytest.mark.parametrize("window", [None, 700 * US], ids=["no-window", "window"])
def test_as_of(window: int | None) -> None:
    """For 200 targets: rebuilt from only what was there before shown_at, the input tokens are equal exactly."""
    events = world(seed=1, num_users=20, num_events=600)
    limits = {"max_history": 12, "max_targets": 5, "max_age_us": 2500 * US, "time_window_us": window}
    parts = rows_of(build(events, **limits))
    picked = [(old, new.slice(i, 1)) for old, new in parts for i in range(len(new))]
    picked = [picked[i] for i in np.random.default_rng(2).permutation(len(picked))[:200]]
    assert len(picked) == 200

    inputs = ["item_id", "surface", "actions", "known", "time", "position", "hi"]
    if window is None:
        inputs.append("lo")  # with a window: see the oracle below
    for old, target in picked:
        event, hi = target["event_id"].item(), target["hi"].item()
        before = as_of(events, event)
        if not hi:
            before = before.filter(event_id=event)
        before = before.with_columns(due=(pl.col("event_id") == event).cast(pl.Int32))
        # From the same first history token: all of the segment's history before the target, whatever its age.
        ((rebuilt, again),) = rows_of(build(before, max_history=max(hi, 1), max_age_us=10**12))
        assert_frame_equal(old.head(hi).select(inputs), rebuilt.select(inputs))
        # What the target itself sees is the newest of these.
        assert target["lo"].item() >= hi - limits["max_history"]
        assert_frame_equal(
            target.select(inputs).drop("lo", strict=False), again.select(inputs).drop("lo", strict=False)
        )


def oracle(events: pl.DataFrame, limits: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    """Return what each target sees, written plainly: event -> (item, actions, known, time) of its keys."""
    seen = {}
    rows = events.to_dicts()
    for target in rows:
        if not target["due"]:
            continue
        keys = []
        for row in rows:
            if row["user_id"] != target["user_id"]:
                continue
            late: dict[Any, int] = {}
            now = 0
            for bit, name in enumerate(ACTIONS):
                if row["actions"] >> bit & 1:
                    at = row[f"{name}_at"]
                    if at is not None and at > row["visible_at"]:
                        late[at] = late.get(at, 0) | 1 << bit
                    else:
                        now |= 1 << bit
            for time, bits in [(row["visible_at"], now), *late.items()]:
                age = (target["shown_at"] - time).total_seconds() * US
                if 0 < age <= min(limits["max_age_us"], limits["time_window_us"] or 10**18):
                    keys.append((time, row["event_id"], row["item_id"], bits, row["known"]))
        keys = sorted(keys)[-limits["max_history"] :]
        seen[target["event_id"]] = [(item, bits, known, time) for time, _, item, bits, known in keys]
    return seen


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_history=st.integers(1, 9),
    max_targets=st.integers(1, 5),
    spare=st.integers(1, 6),
    age=st.sampled_from([200, 1000, 10_000]),
    window=st.sampled_from([None, 300, 2000]),
)
def test_every_target_sees_what_the_rules_say(
    seed: int, max_history: int, max_targets: int, spare: int, age: int, window: int | None
) -> None:
    """Against a plain oracle: keys of every target, each due row once, segments of one user, nothing unseen."""
    events = world(seed, num_users=4, num_events=60)
    limits = {
        "max_history": max_history,
        "max_targets": max_targets,
        "max_age_us": age * US,
        "token_budget": max_history + spare,
        "time_window_us": window and window * US,
    }
    built = build(events, **limits)
    expected = oracle(events, limits)

    seen = {}
    for old, new in rows_of(built):
        assert 1 <= len(new) <= max_targets
        assert len(old) + len(new) <= max_history + spare
        covered = np.zeros(len(old), dtype=bool)
        for column in ("lo", "hi"):
            assert old[column].is_sorted()
            assert new[column].is_sorted()
        assert old["hi"].to_list() == list(range(len(old)))
        for row in new.to_dicts():
            covered[row["lo"] : row["hi"]] = True
            keys = old.slice(row["lo"], row["hi"] - row["lo"])
            seen[row["event_id"]] = keys.select(
                "item_id", "actions", "known", pl.from_epoch("time", "us").dt.replace_time_zone("UTC")
            ).rows()
        assert covered.all(), "history that no target sees"
        if window is not None:
            for row in old.to_dicts():
                first = old.filter(pl.col("time") >= row["time"] - window * US).height
                assert row["lo"] == min(len(old) - first, row["hi"])
    assert seen == expected
    labels = events.filter(pl.col("due") != 0).select("event_id", labels=pl.col("actions") & pl.col("due"), due="due")
    tokens = built.tokens.filter(supervise=1).select("event_id", "labels", due="label_known")
    assert_frame_equal(labels.sort("event_id"), tokens.sort("event_id"))
    owner = dict(events.select("event_id", "user_id").iter_rows())
    users = [user for user, _, count in built.segments.rows() for _ in range(count)]
    assert [owner[event] for event in tokens["event_id"]] == users


def test_shuffling_rows_changes_nothing() -> None:
    """The input's order is no information."""
    events = world(seed=3, num_users=12, num_events=400)
    built = build(events, max_history=10, max_targets=7)

    for seed in range(3):
        again = build(events.sample(fraction=1.0, shuffle=True, seed=seed), max_history=10, max_targets=7)
        assert_frame_equal(built.tokens, again.tokens)
        assert_frame_equal(built.segments, again.segments)


LARGE = """
import hashlib
import polars as pl
from gr_core.data.sequences import SequenceRules, build_sequences

n = 200_000
row = pl.int_range(n, eager=True).cast(pl.UInt64)
events = pl.DataFrame({"row": row}).select(
    event_id=pl.format("e{}", pl.col("row") * 7919 % n),
    user_id=pl.format("u{}", pl.col("row") * 104_729 % 5_003),
    item_id=pl.format("i{}", pl.col("row") * 31 % 997),
    shown_at=(pl.col("row") // 3).cast(pl.Int64).cast(pl.Datetime("us", "UTC")),
    visible_at=(pl.col("row") // 3 + pl.col("row") % 5).cast(pl.Int64).cast(pl.Datetime("us", "UTC")),
    actions=(pl.col("row") % 2).cast(pl.Int32),
    known=pl.lit(1, pl.Int32),
    click_at=pl.lit(None, pl.Datetime("us", "UTC")),
)
rules = SequenceRules(action_names=("click",), features=("item_id",), item_features=("item_id",), max_history=16,
                      max_targets=8, max_age_us=10**9, token_budget=64)
digests = set()
for _ in range(5):
    mask = events.select((pl.col("shown_at").dt.timestamp("us") > 60_000).cast(pl.Int32)).to_series()
    built = build_sequences(events, {"train": mask}, rules, counted=mask > 0)
    digests.add(hashlib.sha256(built.ragged.rows.tobytes() + built.ragged.begin.tobytes() +
                               repr([built.ragged.users.to_pylist(), built.ids, built.ragged.event_ids.to_pylist()]).encode())
                .hexdigest())
    events = events.reverse()
print(*digests, pl.thread_pool_size())
"""


def test_large_builds_are_identical_on_any_number_of_threads() -> None:
    """200,000 events: equal in repeated runs, in reversed order, on 1 and on 16 polars threads (case D1)."""
    outputs = []
    for threads in ("1", "16"):
        environment = {**os.environ, "POLARS_MAX_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run(
            [sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        outputs.append(result.stdout.split())

    assert [output[1] for output in outputs] == ["1", "16"]
    assert [output[0] for output in outputs] == [outputs[0][0]] * 2
