"""`pack.tokens = interleaved` on random worlds: the same history as `targets`, nothing from the future, causal when told."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.data.interleaved import InterleavedSource
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.sequences import build_sequences
from tests.sequences import ACTIONS, TIME, US, Decoded, build, rules, table


def world(seed: int, num_users: int, num_events: int) -> pl.DataFrame:
    """Random events with equal times, delays of their own, late actions and unknown bits; about half are due."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_events):
        shown = int(rng.integers(0, 300)) * 10
        taken = {name: shown + int(rng.integers(0, 12)) * 10 for name in ACTIONS if rng.random() < 0.5}
        rows.append(
            {
                "id": f"e{rng.integers(0, 10**6)}-{i}",
                "user": f"u{rng.integers(0, num_users)}",
                "item": f"i{i}",
                "shown": shown,
                "visible": shown + int(rng.integers(0, 3)) * 25,
                "taken": taken,
                "known": int(rng.integers(0, 4)),
                "due": int(rng.integers(1, 4)) if rng.random() < 0.5 else 0,
            }
        )
    return table(rows)


def segments_of(built: Decoded) -> list[pl.DataFrame]:
    """Return the tokens of each segment."""
    ends = built.segments["length"].cum_sum().to_list()
    return [built.tokens.slice(end - n, n) for end, n in zip(ends, built.segments["length"], strict=True)]


def as_targets(segment: pl.DataFrame, keys: range) -> list[tuple[Any, ...]]:
    """Read keys back as entries: (item, actions, known, time) of each action token, its item from the token before."""
    rows, found = segment.rows(named=True), []
    for at in keys:
        if rows[at]["item_id"] is None:
            pair = at - 1 in keys and rows[at - 1]["item_id"] is not None
            item = rows[at - 1]["item_id"] if pair else None
            found.append((item, rows[at]["actions"], rows[at]["known"], rows[at]["time"]))
    return found


def seen(built: Decoded, *, interleaved: bool) -> dict[str, list[tuple[Any, ...]]]:
    """Return what each target sees as entries; a late action's item, which no interleaved token tells, is left out."""
    found = {}
    for segment in segments_of(built):
        for row in segment.filter(pl.col("supervise") != 0).rows(named=True):
            keys = range(row["lo"], row["hi"])
            if interleaved:
                found[row["event_id"]] = as_targets(segment, keys)
            else:
                own = segment[row["lo"] : row["hi"]].select("item_id", "actions", "known", "time").rows()
                found[row["event_id"]] = own
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_history=st.integers(1, 9),
    max_targets=st.integers(1, 5),
    spare=st.integers(0, 5),
    window=st.sampled_from([None, 300, 2000]),
)
def test_every_target_sees_the_history_that_it_sees_in_targets(
    seed: int, max_history: int, max_targets: int, spare: int, window: int | None
) -> None:
    """Entry by entry the same actions at the same times, labels and users alike; segments keep to the budget."""
    events = world(seed, num_users=3, num_events=50)
    late = {
        (e, at)
        for e, v, *ats in events.select("event_id", "visible_at", "click_at", "like_at").rows()
        for at in ats
        if at and at > v
    }
    limits = {"max_history": max_history, "max_targets": max_targets, "time_window_us": window and window * US}
    plain = build(events, **limits, token_budget=10_000)
    mixed = build(events, **limits, token_budget=2 * max_history + 1 + spare, tokens="interleaved")

    expected, found = seen(plain, interleaved=False), seen(mixed, interleaved=True)
    assert found.keys() == expected.keys()
    for event, entries in expected.items():
        assert [entry[1:] for entry in found[event]] == [entry[1:] for entry in entries]
        told = [(a[0], b[0]) for a, b in zip(found[event], entries, strict=True) if a[0] is not None]
        assert all(own == other for own, other in told)
        assert len(entries) - len(told) <= len(late)
    labels = ["event_id", "labels", "label_known", "time"]
    for one, other in zip(
        mixed.tokens.filter(supervise=1).select(labels).sort("event_id").rows(),
        plain.tokens.filter(supervise=1).select(labels).sort("event_id").rows(),
        strict=True,
    ):
        assert one == other
    assert mixed.segments["length"].max() <= 2 * max_history + 1 + spare


def test_tokens_stand_in_order_and_see_what_the_rules_say() -> None:
    """Item tokens see what was visible before their shown_at, action tokens all before them; positions count up."""
    events = world(seed=5, num_users=6, num_events=200)
    visible = dict(events.select("item_id", "visible_at").rows())
    for segment in segments_of(build(events, tokens="interleaved")):
        time_of, last = [], None
        for at, row in enumerate(segment.rows(named=True)):
            assert row["position"] == at
            if row["item_id"] is None:
                assert (row["lo"], row["hi"], row["supervise"]) == (0, at, 0)
                time_of.append(row["time"])
            else:
                assert (row["actions"], row["known"]) == (0, 0)
                time_of.append(int(visible[row["item_id"]].timestamp()) * US)
                before = [t for t in time_of[:-1] if t < row["time"]]
                assert row["hi"] == len(before)
            assert last is None or time_of[-1] >= last
            last = time_of[-1]


def as_of(events: pl.DataFrame, event_id: str) -> pl.DataFrame:
    """Return what was in the raw rows and actions strictly before a target was shown, and the target's own row."""
    moment = pl.lit(events.filter(event_id=event_id)["shown_at"].item(), TIME)
    itself = pl.col("event_id") == event_id
    rows = events.filter((pl.col("shown_at") < moment) | itself)
    for bit, name in enumerate(ACTIONS):
        at = pl.col(f"{name}_at")
        gone = itself | (at.is_not_null() & (at >= moment))
        rows = rows.with_columns(
            actions=pl.when(gone).then(pl.col("actions") & (0b11 ^ (1 << bit))).otherwise("actions"),
            **{f"{name}_at": pl.when(gone).then(None).otherwise(at)},
        )
    return rows.with_columns(due=pl.when(itself).then(1).otherwise(0).cast(pl.Int32))


def test_as_of() -> None:
    """For 200 targets: rebuilt from only what was there before shown_at, the tokens it can see are equal exactly."""
    events = world(seed=1, num_users=20, num_events=600)
    inputs = ["item_id", "surface", "actions", "known", "time", "position", "lo", "hi"]
    parts = segments_of(build(events, max_history=1000, max_targets=50, tokens="interleaved"))
    picked = [(p, r) for p in parts for r in p.filter(pl.col("supervise") != 0).rows(named=True)]
    picked = [picked[i] for i in np.random.default_rng(2).permutation(len(picked))[:200]]
    assert len(picked) == 200
    for segment, row in picked:
        before = as_of(events, row["event_id"])
        if not row["hi"]:
            before = before.filter(event_id=row["event_id"])
        (again,) = segments_of(build(before, max_history=1000, tokens="interleaved"))
        own = again.filter(pl.col("supervise") != 0).rows(named=True)[0]
        assert (own["item_id"], own["surface"], own["time"], own["hi"]) == tuple(
            row[name] for name in ("item_id", "surface", "time", "hi")
        )
        # context features stand on targets alone, and here a key may be a target of its own
        keys = [name for name in inputs if name != "surface"]
        assert again.head(own["hi"]).select(keys).equals(segment.head(row["hi"]).select(keys))


@pytest.mark.parametrize(("delay", "causal"), [(50, True), (150, False)])
def test_a_segment_is_causal_where_each_event_is_visible_before_the_next(
    tmp_path: Any, *, delay: int, causal: bool
) -> None:
    """Shown every 100 s: visible after 50 s makes plain causal attention the same, after 150 s it does not."""
    rows = [
        {
            "id": f"e{i}",
            "user": "u",
            "item": f"i{i}",
            "shown": 100 * i,
            "visible": 100 * i + delay,
            "due": 1 if i > 3 else 0,
        }
        for i in range(8)
    ]
    built = build_sequences(
        table(rows), {"train": table(rows)["due"]}, rules(features=("item_id",), tokens="interleaved")
    )
    codes = {"item_id": np.arange(100, dtype=np.int32)}
    assert built.places is not None
    source = InterleavedSource([built.ragged], [built.places], [codes], 1)
    meta = PackMeta(
        role="train", features=("item_id",), actions=ACTIONS, supervised=3, token_budget=64, tokens="interleaved"
    )
    index = write_pack(tmp_path, source, meta)

    assert index["segment_causal"] == [causal]
    assert index["num_tokens"] == source.lengths.sum() == 15 - (not causal)
