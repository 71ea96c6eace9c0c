"""Sequences: what each target sees, as of its shown_at, and how users are cut into segments."""

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

from gr_core.data.sequences import SequenceRules, Sequences, build_sequences
from gr_core.errors import ConfigError

US = 1_000_000
ACTIONS = ("click", "like")
TIME = pl.Datetime("us", "UTC")
TOKENS = ["item_id", "actions", "known", "time", "lo", "hi", "position", "supervise", "labels", "label_known"]


def rules(**changes: Any) -> SequenceRules:
    values: dict[str, Any] = {
        "action_names": ACTIONS,
        "features": ("item_id", "surface"),
        "item_features": ("item_id",),
        "max_history": 128,
        "max_targets": 64,
        "max_age_us": 360 * 86_400 * US,
        "token_budget": 8192,
    }
    return SequenceRules(**{**values, **changes})


def table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Make event rows; times in seconds, actions as {name: second or None}, visible 1800 s after shown."""
    return pl.DataFrame(
        {
            "event_id": [row["id"] for row in rows],
            "user_id": [row["user"] for row in rows],
            "item_id": [row["item"] for row in rows],
            "shown_at": [row["shown"] * US for row in rows],
            "visible_at": [row.get("visible", row["shown"] + 1800) * US for row in rows],
            "actions": [sum(1 << ACTIONS.index(name) for name in row.get("taken", {})) for row in rows],
            "known": [row.get("known", 0b11) for row in rows],
            **{
                f"{name}_at": [
                    None if row.get("taken", {}).get(name) is None else row["taken"][name] * US for row in rows
                ]
                for name in ACTIONS
            },
            "surface": [row.get("surface", "home") for row in rows],
            "due": [row.get("due", 0) for row in rows],
        },
        schema={
            **dict.fromkeys(("event_id", "user_id", "item_id"), pl.String),
            **dict.fromkeys(("shown_at", "visible_at"), TIME),
            **dict.fromkeys(("actions", "known"), pl.Int32),
            **dict.fromkeys((f"{name}_at" for name in ACTIONS), TIME),
            "surface": pl.String,
            "due": pl.Int32,
        },
    )


def build(events: pl.DataFrame, **changes: Any) -> Sequences:
    return build_sequences(events, events["due"], rules(**changes))


def history(user: str, count: int, *, start: int = 0, step: int = 100) -> list[dict[str, Any]]:
    return [
        {"id": f"{user}{i:04d}", "user": user, "item": f"i{i}", "shown": start + i * step, "visible": start + i * step}
        for i in range(count)
    ]


EXAMPLE = table(
    [
        {"id": "a1", "user": "A", "item": "6", "shown": 1000, "taken": {"click": 1010, "like": 4000}},
        {"id": "a2", "user": "A", "item": "7", "shown": 1100},
        {"id": "a3", "user": "A", "item": "8", "shown": 1200, "taken": {"like": 1500}},
        {"id": "a4", "user": "A", "item": "7", "shown": 5000, "taken": {"click": 5020}, "due": 0b11},
        {"id": "a5", "user": "A", "item": "9", "shown": 7000, "due": 0b11},
        {"id": "b1", "user": "B", "item": "6", "shown": 2000},
        {"id": "b2", "user": "B", "item": "9", "shown": 3000, "taken": {"click": 3005}, "due": 0b11},
        {"id": "b3", "user": "B", "item": "10", "shown": 4000, "known": 0b01, "due": 0b01},
    ]
)
# item, actions, known, time, lo, hi, position, supervise, labels, label_known; lo and hi from the segment's first token.
EXPECTED = [
    ("6", 0b01, 0b11, 2800, 0, 0, 0, 0, 0, 0),
    ("7", 0b00, 0b11, 2900, 0, 1, 1, 0, 0, 0),
    ("8", 0b10, 0b11, 3000, 0, 2, 2, 0, 0, 0),
    ("6", 0b10, 0b11, 4000, 0, 3, 3, 0, 0, 0),
    ("7", 0b01, 0b11, 6800, 0, 4, 4, 0, 0, 0),
    ("7", 0, 0, 5000, 0, 4, 4, 1, 0b01, 0b11),
    ("9", 0, 0, 7000, 0, 5, 5, 1, 0b00, 0b11),
    ("6", 0b00, 0b11, 3800, 0, 0, 0, 0, 0, 0),
    ("9", 0, 0, 3000, 0, 0, 0, 1, 0b01, 0b11),
    ("10", 0, 0, 4000, 0, 1, 1, 1, 0b00, 0b01),
]


def test_example_2_token_for_token() -> None:
    """The two users of example 2: late like, own click unseen, unknown like, unseen history left out."""
    built = build(EXAMPLE)

    actual = [(*row[:3], row[3] // US, *row[4:]) for row in built.tokens.select(TOKENS).rows()]
    assert actual == EXPECTED
    assert built.tokens["event_id"].to_list() == [None] * 5 + ["a4", "a5", None, "b2", "b3"]
    assert built.tokens["surface"].to_list() == [None] * 5 + ["home"] * 2 + [None] + ["home"] * 2
    assert built.tokens["weight"].to_list() == [1.0] * 10
    assert built.segments.rows() == [("A", 7, 2), ("B", 3, 2)]


def test_example_2_with_a_time_window() -> None:
    """W = 3000 s raises lo where visible_at(key) < time(query) - W."""
    tokens = build(EXAMPLE, time_window_us=3000 * US).tokens

    assert tokens["lo"].to_list() == [0, 0, 0, 0, 3, 0, 3, 0, 0, 0]
    assert_frame_equal(build(EXAMPLE).tokens.drop("lo"), tokens.drop("lo"))


def test_column_types_are_those_of_a_pack() -> None:
    """Masks and intervals are int32, time int64, supervise uint8, weight float32; also with nothing due."""
    for built in (build(EXAMPLE), build(EXAMPLE.with_columns(due=pl.lit(0, pl.Int32))), build(EXAMPLE.clear())):
        assert built.tokens.schema == pl.Schema(
            {
                "item_id": pl.String,
                "surface": pl.String,
                **dict.fromkeys(("actions", "known", "labels", "label_known"), pl.Int32),
                "time": pl.Int64,
                **dict.fromkeys(("position", "lo", "hi"), pl.Int32),
                "supervise": pl.UInt8,
                "weight": pl.Float32,
                "event_id": pl.String,
            }
        )
        assert built.segments.schema == pl.Schema({"user_id": pl.String, "length": pl.Int64, "num_targets": pl.Int64})
        assert built.segments["length"].sum() == built.tokens.height


def test_a_users_only_event_has_no_history() -> None:
    """One event on D: empty history, one target that does not see itself (case E10)."""
    built = build(table([{"id": "x", "user": "u", "item": "i", "shown": 10, "visible": 10, "due": 1}]))

    assert built.tokens.select("supervise", "lo", "hi", "position").rows() == [(1, 0, 0, 0)]
    assert built.segments.rows() == [("u", 1, 1)]


def test_truncation_keeps_the_newest() -> None:
    """max_history 3 and five history events: the newest three, all columns cut alike, 3 + 1 tokens (case E12)."""
    rows = [*history("u", 5), {"id": "t", "user": "u", "item": "t", "shown": 1000, "due": 1}]
    built = build(table(rows), max_history=3)

    assert built.tokens["item_id"].to_list() == ["i2", "i3", "i4", "t"]
    assert built.tokens["time"].to_list() == [200 * US, 300 * US, 400 * US, 1000 * US]
    assert built.segments.rows() == [("u", 4, 1)]
    assert built.tokens.row(3, named=True)["lo"] == 0


def test_every_target_sees_the_newest_history_of_its_own_time() -> None:
    """Between two targets history grows: lo moves with it, and the older token stays for the first target only."""
    rows = [
        *history("u", 4),
        {"id": "s", "user": "u", "item": "s", "shown": 250, "visible": 10_000, "due": 1},
        {"id": "t", "user": "u", "item": "t", "shown": 1000, "visible": 10_000, "due": 1},
    ]
    built = build(table(rows), max_history=2)

    assert built.tokens["item_id"].to_list() == ["i1", "i2", "i3", "s", "t"]
    assert built.tokens.filter(supervise=1).select("lo", "hi", "position").rows() == [(0, 2, 2), (1, 3, 3)]


def test_strictly_before() -> None:
    """What becomes visible, or is acted, exactly at shown_at is not seen."""
    rows = [
        {"id": "h", "user": "u", "item": "h", "shown": 0, "visible": 50, "taken": {"like": 100}},
        {"id": "i", "user": "u", "item": "i", "shown": 0, "visible": 100},
        {"id": "t", "user": "u", "item": "t", "shown": 100, "due": 1},
    ]

    assert build(table(rows)).tokens["item_id"].to_list() == ["h", "t"]


def test_late_actions_are_tokens_of_their_own() -> None:
    """Late bits only, at their time; two at one moment share a token; no time counts as known at visible_at."""
    rows = [
        {"id": "g", "user": "u", "item": "g", "shown": 0, "visible": 10, "taken": {"click": 30, "like": 30}},
        {"id": "h", "user": "u", "item": "h", "shown": 0, "visible": 10, "taken": {"click": None, "like": 20}},
        {"id": "t", "user": "u", "item": "t", "shown": 100, "due": 1},
    ]

    tokens = build(table(rows)).tokens
    assert tokens.select("item_id", "actions", "known", pl.col("time") // US).rows()[:4] == [
        ("g", 0b00, 0b11, 10),
        ("h", 0b01, 0b11, 10),
        ("h", 0b10, 0b11, 20),
        ("g", 0b11, 0b11, 30),
    ]


def test_old_history_is_out_of_reach() -> None:
    """max_age counts back from the target's shown_at; the border itself is seen."""
    rows = [*history("u", 4), {"id": "t", "user": "u", "item": "t", "shown": 500, "due": 1}]

    assert build(table(rows), max_age_us=300 * US).tokens["item_id"].to_list() == ["i2", "i3", "t"]


def test_ties_go_by_event_id_never_by_item() -> None:
    """Equal times: history in (visible_at, event_id) order, targets in (shown_at, event_id) order (case E5)."""
    old = [{"id": f"h{i}", "user": "u", "item": f"z{9 - i}", "shown": 0, "visible": 0} for i in range(4)]
    new = [{"id": f"t{i}", "user": "u", "item": f"y{9 - i}", "shown": 10, "visible": 99, "due": 1} for i in range(3)]

    tokens = build(table([*new[::-1], *old[::-1]])).tokens
    assert tokens["item_id"].to_list() == ["z9", "z8", "z7", "z6", "y9", "y8", "y7"]
    assert tokens["hi"].to_list() == [0, 1, 2, 3, 4, 4, 4]


def test_many_targets_become_segments_with_overlapping_history() -> None:
    """max_targets a segment; each later segment starts max_history before what its first target sees."""
    rows = history("u", 10)
    for row in rows[5:]:
        row["due"] = 1
    built = build(table(rows), max_targets=2, max_history=3)

    assert built.segments.rows() == [("u", 6, 2), ("u", 6, 2), ("u", 4, 1)]
    assert built.tokens["item_id"].to_list() == [
        *("i2", "i3", "i4", "i5", "i5", "i6"),
        *("i4", "i5", "i6", "i7", "i7", "i8"),
        *("i6", "i7", "i8", "i9"),
    ]
    assert built.tokens.filter(supervise=1)["lo"].to_list() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(("budget", "longest"), [(9, 9), (16, 15), (17, 17)])
def test_a_segment_never_exceeds_the_budget(budget: int, longest: int) -> None:
    """Before the budget is passed a new segment begins, and every target keeps its history."""
    rows = history("u", 60)
    for row in rows[10:]:
        row["due"] = 1
    built = build(table(rows), max_history=8, token_budget=budget)

    assert built.segments["length"].max() == longest
    assert (built.tokens.filter(supervise=1).select(pl.col("hi") - pl.col("lo")).to_series() == 8).all()
    assert built.segments["num_targets"].sum() == 50


def test_a_gap_opens_a_segment() -> None:
    """No history is in a segment that none of its targets sees."""
    rows = history("u", 30)
    rows[3]["due"] = rows[20]["due"] = 1
    built = build(table(rows), max_history=4)

    assert built.segments.rows() == [("u", 4, 1), ("u", 5, 1)]
    assert built.tokens["item_id"].to_list() == ["i0", "i1", "i2", "i3", "i16", "i17", "i18", "i19", "i20"]


def test_carried_columns_and_unknown_features() -> None:
    """A carried side feature stands on all tokens, null stays null."""
    rows = [
        {"id": "h", "user": "u", "item": "h", "shown": 0, "visible": 1, "surface": None},
        {"id": "t", "user": "u", "item": "t", "shown": 100, "due": 1},
    ]

    tokens = build(table(rows), features=("item_id",), carry=("surface",)).tokens
    assert tokens["surface"].to_list() == [None, "home"]


def test_null_and_zero_masks_are_no_target() -> None:
    """A user without new events is as if not there, whether the mask is 0 or null (case D10)."""
    rows = [*history("u", 3), *history("v", 3), {"id": "t", "user": "v", "item": "t", "shown": 900, "due": 1}]
    events = table(rows)

    zero = build(events)
    null = build_sequences(events, events.select(pl.col("due").replace(0, None)).to_series(), rules())
    absent = build(events.filter(user_id="v"))
    for built in (null, absent):
        assert_frame_equal(zero.tokens, built.tokens)
        assert_frame_equal(zero.segments, built.segments)
    assert zero.segments["user_id"].to_list() == ["v"]


def test_interleaved_is_refused_by_name() -> None:
    """pack.tokens = interleaved is a clear error, never another layout."""
    with pytest.raises(ConfigError, match=r"pack\.tokens.*interleaved"):
        build(EXAMPLE, tokens="interleaved")


def test_a_mask_of_another_length_is_refused() -> None:
    """One mask entry a row."""
    with pytest.raises(ValueError, match="one entry a row"):
        build_sequences(EXAMPLE, EXAMPLE["due"].head(3), rules())


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


def rows_of(built: Sequences) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
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
        mask = before.select((pl.col("event_id") == event).cast(pl.Int32)).to_series()
        # From the same first history token: all of the segment's history before the target, whatever its age.
        wide = rules(max_history=max(hi, 1), max_age_us=10**12)
        ((rebuilt, again),) = rows_of(build_sequences(before, mask, wide))
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
    built = build_sequences(events, mask, rules)
    columns = [*built.tokens.select("item_id", "time", "lo", "hi", "event_id"), *built.segments]
    digests.add(hashlib.sha256(repr([column.hash(1).sum() for column in columns]).encode() +
                               built.tokens["time"].to_numpy().tobytes()).hexdigest())
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
