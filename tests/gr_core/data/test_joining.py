"""How action rows meet events: windows, the earliest row, waiting rows, and counts that add up."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.config import Config
from gr_core.data import actions, joining
from gr_core.data.actions import ActionBatch
from gr_core.data.batch import polars_schema
from gr_core.data.joining import Asked, Joined, Settled
from gr_core.lake import quarantine
from gr_core.lake.events import reach
from gr_core.refs import CARRIED, ActionRows, day_end_us
from tests.shop import BUY, CLICK, DAY, NOON, ZONE, make_config

CONFIG = make_config(Path("raw"))
LIKE = 0b100
WINDOWS = [{"name": "click", "attribution_window_seconds": 1800}, {"name": "buy", "attribution_window_seconds": 86_400}]
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
CUTOFF = day_end_us(DAY, ZONE)


def events(*found: dict[str, Any]) -> pl.DataFrame:
    schema = {name: dtype for name, dtype in polars_schema(CONFIG).items() if name not in ("commit", "updated")}
    base = {"user_id": "u", "item_id": "i", "shown_at": NOON, "visible_at": NOON, "actions": 0, "known": 0, "bucket": 0}
    return joining.know_all(CONFIG, pl.DataFrame([{**base, **event} for event in found], schema=schema))


def batch(*rows: tuple[str, int, datetime], bad: int = 0) -> ActionBatch:
    frame = pl.DataFrame(
        [{"event_id": e, "actions": bits, "acted_at": at, "feed": "actions", "file": "f"} for e, bits, at in rows],
        schema=actions.SCHEMA,
    )
    spoilt = {"reason": ["bad_row"] * bad, "feed": ["actions"] * bad, "file": ["f"] * bad, "row": ["{"] * bad}
    return ActionBatch(rows=frame, quarantine=pl.DataFrame(spoilt, schema=quarantine.SCHEMA), read=frame.height + bad)


def meet(
    found: pl.DataFrame, rows: ActionBatch, waiting: pl.DataFrame | None = None, cutoff_us: int = CUTOFF, **more: Any
) -> tuple[Asked, Joined, Settled]:
    asked = joining.ask(rows, joining.WAITING.to_frame() if waiting is None else waiting)
    joined = joining.join(CONFIG, asked, found)
    rows = replace(rows, cutoff_us=cutoff_us)
    return asked, joined, joining.settle(CONFIG, rows, asked, joined.fates, number=9, **more)


def test_windows_are_half_open() -> None:
    """From shown_at on, up to but without shown_at + window, each action by its own."""
    late = timedelta(days=1)
    rows = batch(
        ("e", CLICK, NOON),
        ("f", CLICK, NOON + 0.5 * HOUR),
        ("f", CLICK, NOON - SECOND),
        ("e", BUY, NOON + late - SECOND),
        ("f", BUY, NOON + late),
    )
    _, joined, settled = meet(events({"event_id": "e"}, {"event_id": "f"}), rows)
    assert joined.fates.to_list() == [joining.MERGED, joining.OUTSIDE_WINDOW, joining.OUTSIDE_WINDOW, 3, 1]
    told = joined.events.select("event_id", "actions", "known", "click_at", "buy_at").rows()
    assert told == [("e", 3, 3, NOON, NOON + late - SECOND), ("f", 0, 3, None, None)]
    assert settled.counts == ActionRows(read=5, merged=2, quarantined=3)
    assert settled.quarantine["reason"].to_list() == ["outside_window"] * 3
    assert '"event_id":"f"' in settled.quarantine["row"][0]


def test_the_earliest_row_counts() -> None:
    """Of several rows of one action the earliest is merged; an earlier one of a later night takes its place."""
    found = events({"event_id": "e"})
    rows = batch(("e", CLICK, NOON + 2 * SECOND), ("e", CLICK, NOON + SECOND), ("e", CLICK, NOON + 2 * SECOND))
    _, first, settled = meet(found, rows)
    assert first.events["click_at"].to_list() == [NOON + SECOND]
    assert settled.counts == ActionRows(read=3, merged=1, duplicates=2)
    _, again, settled = meet(first.events, rows)
    assert again.events.equals(first.events)
    assert settled.counts == ActionRows(read=3, duplicates=3)
    _, earlier, settled = meet(first.events, batch(("e", CLICK, NOON)))
    assert earlier.events["click_at"].to_list() == [NOON]
    assert settled.counts == ActionRows(read=1, merged=1)


def test_a_row_of_several_actions_counts_once() -> None:
    """It is merged when one of its actions is; outside only when all are."""
    found = events({"event_id": "e"}, {"event_id": "f"})
    rows = batch(("e", CLICK, NOON), ("e", CLICK | BUY, NOON), ("f", CLICK | BUY, NOON + HOUR))
    _, joined, settled = meet(found, rows)
    assert joined.events["actions"].to_list() == [CLICK | BUY, BUY]
    assert settled.counts == ActionRows(read=3, merged=3)


def test_a_row_without_impression_waits_for_its_window() -> None:
    """Pending until acted_at + window + lateness is before the cutoff, by the longest window of its actions."""
    rows = batch(("x", CLICK, NOON), ("y", CLICK | BUY, NOON), bad=1)
    click_over, buy_over = ((NOON + wait).timestamp() * 1e6 for wait in (0.5 * HOUR, 24 * HOUR))
    for cutoff, waits in ((click_over, ["x", "y"]), (click_over + 1, ["y"]), (buy_over, ["y"]), (buy_over + 1, [])):
        _, _, settled = meet(events(), rows, cutoff_us=round(cutoff))
        assert settled.pending["event_id"].to_list() == waits
        assert settled.counts == ActionRows(read=3, pending=len(waits), quarantined=3 - len(waits))
    lenient = make_config(Path("raw"), source={"lateness_seconds": 1})
    asked = joining.ask(rows, joining.WAITING.to_frame())
    none = pl.Series([0, 0], dtype=pl.Int8)
    settled = joining.settle(lenient, replace(rows, cutoff_us=round(click_over) + 1), asked, none, number=9)
    assert settled.pending["event_id"].to_list() == ["x", "y"]


def test_waiting_rows_have_counts_of_their_own() -> None:
    """What waited is merged, doubled, left waiting or given up beside tonight's rows, never among them."""
    waiting = batch(("e", CLICK, NOON), ("x", BUY, NOON), ("y", CLICK, NOON), ("z", BUY, NOON)).rows.with_columns(
        commit=pl.lit(4, pl.Int64)
    )
    rows = batch(("e", CLICK, NOON + SECOND), ("x", BUY, NOON), ("n", BUY, NOON))
    asked, joined, settled = meet(events({"event_id": "e"}), rows, waiting)
    assert joined.events["click_at"].to_list() == [NOON]
    assert settled.pending.select("event_id", "commit").rows() == [("x", 4), ("z", 4), ("n", 9)]
    assert settled.counts == ActionRows(
        read=3,
        duplicates=2,  # the later click, and x again
        pending=1,
        pending_before=4,
        carried={"merged": 1, "duplicates": 0, "pending": 2, "quarantined": 1, "forgotten": 0},
    )
    assert settled.quarantine["reason"].to_list() == ["no_impression"]
    assert asked.rows.height == 6


def test_rows_of_forgotten_users_are_counted_and_kept_nowhere() -> None:
    """A row whose impression was left out for its user's sake is forgotten: neither pending nor in quarantine."""
    waiting = batch(("w", CLICK, NOON)).rows.with_columns(commit=pl.lit(4, pl.Int64))
    _, _, settled = meet(events(), batch(("x", CLICK, NOON)), waiting, forgotten=pl.Series(["w", "x"]))
    assert settled.pending.is_empty()
    assert settled.quarantine.is_empty()
    assert (settled.counts.forgotten, settled.counts.carried["forgotten"]) == (1, 1)


def test_a_repeated_impression_takes_nothing_back() -> None:
    """A row's "not taken" is silent about an actions feed's action; its "taken" adds, with the earlier time."""
    old = events({"event_id": "e", "actions": CLICK, "click_at": NOON + SECOND})
    new = events(
        {"event_id": "e", "actions": CLICK | BUY, "known": 3, "click_at": None, "buy_at": NOON},
    )
    told = joining.own_word(CONFIG, old, new)
    assert told.select("actions", "known", "click_at", "buy_at").rows() == [(3, 3, NOON + SECOND, NOON)]
    silent = joining.own_word(CONFIG, old, events({"event_id": "e", "known": 3}))
    assert silent["known"].to_list() == [0]
    assert silent.columns == old.columns


def test_repeats_and_action_rows_meet_in_one_update() -> None:
    """A bucket's new events and table rows learn from both at once; what nobody speaks of is not told."""
    config = make_config(Path("raw"), source={"actions": [*WINDOWS, {"name": "like"}]})
    schema = polars_schema(config)
    base = {"user_id": "u", "item_id": "i", "shown_at": NOON, "visible_at": NOON, "actions": 0, "known": 7, "bucket": 0}

    def frame(*found: dict[str, Any]) -> pl.DataFrame:
        return pl.DataFrame([{**base, **event} for event in found], schema=schema)

    old = frame(
        {"event_id": "both", "actions": CLICK | LIKE, "click_at": NOON + SECOND},
        {"event_id": "repeat"},
        {"event_id": "row"},
        {"event_id": "none", "actions": BUY},
    )
    repeats = frame({"event_id": "repeat", "actions": LIKE}, {"event_id": "both", "known": 0b011})
    inserts = frame({"event_id": "new", "known": 0})
    rows = batch(("both", CLICK, NOON), ("both", BUY, NOON), ("row", BUY, NOON), ("new", CLICK, NOON))
    met = joining.meet(config, joining.ask(rows, joining.WAITING.to_frame()), inserts, old, repeats)
    assert met.fates.to_list() == [joining.MERGED] * 4
    assert met.inserts.select("event_id", "actions", "known", "click_at").rows() == [("new", CLICK, 0b011, NOON)]
    told = met.told.select("event_id", pl.col("actions") & pl.col("known"), "known", "click_at", "buy_at")
    assert told.rows() == [
        ("both", CLICK | BUY, CLICK | BUY, NOON, NOON),
        ("repeat", LIKE, LIKE, None, None),
        ("row", BUY, BUY, None, NOON),
        ("none", BUY, BUY, None, None),
    ]


def test_late_rows_reach_their_own_days_only() -> None:
    """The table is read per lake day of the rows, back by their longest window; what overlaps is one range."""
    rows = batch(
        ("a", CLICK, NOON),
        ("b", CLICK, NOON + 24 * HOUR),
        ("c", BUY, NOON - timedelta(days=30)),
    ).rows
    day = datetime(2025, 6, 1, 4, tzinfo=UTC)  # New York's midnight
    us = [
        (day - timedelta(days=31), day - timedelta(days=29)),
        (day - 0.5 * HOUR, day + timedelta(days=2)),
    ]
    assert reach.apart(joining.spans(CONFIG, rows)) == [
        (round(a.timestamp() * 1e6), round(b.timestamp() * 1e6)) for a, b in us
    ]
    assert joining.spans(CONFIG, rows.head(0)) == []


_ROW = st.tuples(
    st.sampled_from([f"e{n}" for n in range(6)]),
    st.sampled_from([CLICK, BUY, CLICK | BUY]),
    st.integers(-100, 2000).map(lambda seconds: NOON + seconds * SECOND),
    st.integers(0, 2),
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(_ROW, max_size=12),
    nights=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_any_split_ends_in_the_same_bits(rows: list[tuple[str, int, datetime, int]], nights: list[int]) -> None:
    """Impressions and action rows in any nights: bits and times are those of one night, and each night adds up."""
    split = _nights(CONFIG, [[row[:3] for row in rows if row[3] == n] for n in range(3)], nights)
    whole = _nights(CONFIG, [[row[:3] for row in reversed(rows)], [], []], [0] * 6)
    assert split.equals(whole)


def _nights(config: Config, rows: list[list[tuple[str, int, datetime]]], shown: list[int]) -> pl.DataFrame:
    """Run three nights without a table; the impression of event n comes in night shown[n]."""
    table, waiting = events(), joining.WAITING.to_frame()
    seen = 0
    for night, found in enumerate(rows):
        new = [{"event_id": f"e{n}", "shown_at": NOON + n * SECOND} for n, when in enumerate(shown) if when == night]
        tonight = batch(*found, bad=night)
        found_events = pl.concat([table, events(*new)])
        _, joined, settled = meet(found_events, tonight, waiting, cutoff_us=0)  # before any window ends
        table, before = joined.events, waiting.height
        counts, waiting = settled.counts, settled.pending
        assert counts.read == len(found) + night
        assert counts.pending_before == before
        assert waiting.height == counts.pending + counts.carried["pending"]
        assert set(counts.carried) == set(CARRIED)
        seen += counts.read
    assert waiting.is_empty()  # every event came
    assert seen == sum(map(len, rows)) + 3
    return table.sort("event_id")
