"""Sequences: what each target sees, as of its shown_at, and how users are cut into segments."""

from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.data.sequences import build_sequences
from gr_core.errors import ConfigError
from tests.sequences import US, build, rules, table

TOKENS = ["item_id", "actions", "known", "time", "lo", "hi", "position", "supervise", "labels", "label_known"]


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
