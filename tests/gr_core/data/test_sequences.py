"""Sequences: what each target sees, as of its shown_at, and how users are cut into segments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.data import ragged
from gr_core.data.sequences import Sequences, build_sequences, load_ids, save
from tests.sequences import US, build, decoded, rules, table

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


def test_ids_have_types_and_null_is_unknown() -> None:
    """A feature's dictionary keeps an id apart by its type; a null feature stays null, of whatever type."""
    rows = [
        {"id": "g", "user": "u", "item": "i", "shown": 0, "visible": 1, "surface": None},
        {"id": "h", "user": "u", "item": "i", "shown": 10, "visible": 11, "surface": "feed"},
        {"id": "t", "user": "u", "item": "t", "shown": 100, "due": 1},
    ]
    events = table(rows).with_columns(shelf=pl.Series([None, "s", "s"]))
    limits = rules(features=("item_id", "shelf"), item_features=("item_id", "shelf"))
    limits = replace(limits, fallback_by=(("item_id", "surface"), ("shelf", "surface")))
    counted = pl.Series([True, True, False])
    built = build_sequences(events, {"train": events["due"]}, limits, counted=counted)

    assert built.ids["item_id"].rows() == [("i", None, 1), ("i", "feed", 1), ("t", "home", 0)]
    assert built.ids["shelf"].rows() == [("s", "feed", 1), ("s", "home", 0)]
    assert decoded(built).tokens.select("item_id", "shelf").rows() == [("i", None), ("i", "s"), ("t", "s")]


def test_null_and_zero_masks_are_no_target() -> None:
    """A user without new events is as if not there, whether the mask is 0 or null (case D10)."""
    rows = [*history("u", 3), *history("v", 3), {"id": "t", "user": "v", "item": "t", "shown": 900, "due": 1}]
    events = table(rows)

    zero = build(events)
    null = build(events.with_columns(pl.col("due").replace(0, None)))
    absent = build(events.filter(user_id="v"))
    for built in (null, absent):
        assert_frame_equal(zero.tokens, built.tokens)
        assert_frame_equal(zero.segments, built.segments)
    assert zero.segments["user_id"].to_list() == ["v"]


def test_a_mask_of_another_length_is_refused() -> None:
    """One mask entry a row."""
    with pytest.raises(ValueError, match="one entry a row"):
        build_sequences(EXAMPLE, {"train": EXAMPLE["due"].head(3)}, rules())


def test_roles_share_segments_where_their_targets_are_the_same() -> None:
    """One row a token for all roles; a user whose targets differ between two roles has segments of its own in each."""
    rows = [row for user in "uvwx" for row in history(user, 4)]
    events = table(rows)
    last, two = events["event_id"].str.ends_with("3"), events["event_id"].str.contains("[23]$")

    def mask(condition: pl.Series, users: str) -> pl.Series:
        return (condition & events["user_id"].is_in(list(users))).cast(pl.Int32)

    masks = {"train": mask(last, "uv"), "next_day": mask(last, "uw") | mask(two, "v"), "holdout": mask(last, "w")}
    built = build_sequences(events, masks, rules())

    assert built.ragged.roles.tolist() == [0b011, 0b001, 0b010, 0b110]
    assert built.ragged.users.to_pylist() == ["u", "v", "w"]
    assert built.ragged.num_history == 9
    assert len(built.ragged.rows) == 9 + 1 + 1 + 2 + 1
    for bit, name in enumerate(masks):
        alone = build(events.with_columns(masks[name].alias("due")))
        together = decoded(built, 1 << bit)
        assert_frame_equal(together.tokens, alone.tokens)
        assert_frame_equal(together.segments, alone.segments)


def test_what_no_token_and_no_count_needs_leaves_no_trace() -> None:
    """Other users, and history beyond every target's reach, change neither rows nor dictionaries."""
    rows = [*history("u", 9), *history("v", 3)]
    rows[8]["due"] = 1
    events = table(rows)
    counted = pl.Series([row["id"] == "v0001" for row in rows])
    needed = pl.Series([row["id"] in ("u0006", "u0007", "u0008", "v0001") for row in rows])

    def files(some: pl.Series) -> list[Any]:
        part = events.filter(some)
        built = build_sequences(part, {"t": part["due"]}, rules(max_history=2), counted=counted.filter(some))
        return [built.ragged.rows.tolist(), built.ragged.begin.tolist(), {k: v.rows() for k, v in built.ids.items()}]

    assert files(needed) == files(pl.Series([True] * len(rows)))
    assert files(needed)[2]["item_id"] == [("i6", None, 0), ("i7", None, 0), ("i8", None, 0), ("i1", None, 1)]


def test_times_beyond_one_key_are_ordered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users and times that 63 bits do not hold together give the same sequences."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "id": f"e{i}",
            "user": f"u{i % 3}",
            "item": f"i{i}",
            "shown": int(t),
            "taken": {"like": int(t) + 5000},
            "due": 1,
        }
        for i, t in enumerate(rng.integers(0, 10_000, 60))
    ]
    limits = {"max_history": 8, "max_age_us": 4000 * US, "time_window_us": 3500 * US}
    expected = build(table(rows), **limits)
    monkeypatch.setattr("gr_core.data.timeline.KEY_BITS", 20)

    found = build(table(rows), **limits)
    assert_frame_equal(found.tokens, expected.tokens)
    assert_frame_equal(found.segments, expected.segments)


def test_sequences_come_back_from_their_files(tmp_path: Path) -> None:
    """Rows, segments, texts and dictionaries, null types among them; equal sequences give equal bytes."""
    events = EXAMPLE.with_columns(kind=pl.Series([None, "k"] * 4))
    limits = replace(rules(), fallback_by=(("item_id", "kind"),))
    built = build_sequences(events, {"train": events["due"]}, limits, counted=pl.Series([True] * 8))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(built, tmp_path / name)
    again = ragged.read(tmp_path / "a")

    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == sorted(
        ["rows.arrow", "segments.arrow", "events.arrow", "item_id.ids.arrow", "surface.ids.arrow"]
    )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for name, frame in built.ids.items():
        assert_frame_equal(load_ids(tmp_path / "a", name), frame)
    read = Sequences(ragged=again, ids=built.ids)
    assert_frame_equal(decoded(read).tokens, decoded(built).tokens)
    assert_frame_equal(decoded(read).segments, decoded(built).segments)
