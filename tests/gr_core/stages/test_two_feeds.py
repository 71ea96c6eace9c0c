"""A source of impressions and actions, ingested night by night: example 4.2, late labels, and counts that add up."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gr_core.config import Config
from gr_core.data import due
from gr_core.data.contract import read_day
from gr_core.errors import DataContractError
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable, layout
from gr_core.lake.source import list_files
from gr_core.refs import Bound, day_end_us
from gr_core.stages import checking, erasing, ingesting
from tests import shop
from tests.sequences import build
from tests.shop import BUY, CLICK, DAY, NOON, action, impression, make_config, write_actions, write_impressions

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
NEXT = DAY + timedelta(days=1)


class Shop:
    """The nights of one two-feed lake, ingestion only."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config: Config = make_config(folder / "raw", **changes)
        self.root = folder / "raw"
        self.table = EventTable(str(folder / "home" / "lake" / "events"), self.config)
        self.parent: Bound | None = None

    def night(self, day: date, shown: list[dict[str, Any]], *acted: list[dict[str, Any]]) -> Commit:
        """Write a day's files, one of actions for each list of them, and ingest it."""
        write_impressions(self.root, day, shown)
        for part, rows in enumerate(acted):
            write_actions(self.root, day, rows, part=part)
        return self.ingest(day)

    def ingest(self, day: date) -> Commit:
        """Ingest a day's files as they are."""
        events = self.config.source.feeds[0]
        files = [file for feed in self.config.source.feeds for file in list_files(self.config, day, feed)]
        again = ingesting.restated(self.config, self.table, day, events)
        batch = read_day(self.config, day, files, feed=events, restated=again)
        rows = ingesting.read_actions(self.config, [*again, (day, files)], day_end_us(day, shop.ZONE))
        return self.table.ingest(str(day), batch, parent=self.parent, actions=rows)

    def bound(self, commit: Commit, day: date) -> Bound:
        """Return the bound of a day's night."""
        cutoff = day_end_us(day, shop.ZONE)
        return due.make_bound(self.config, commit.number, cutoff, commit.delta_version, self.parent)

    def rows(self) -> pl.DataFrame:
        """Return the table, by event_id."""
        return self.table.read(self.table.delta_version()).sort("event_id")

    def due(self, now: Bound, parent: Bound | None) -> dict[str, int]:
        """Return the due bits of each event that has some."""
        rows = self.rows()
        source = self.config.source
        mask = rows.select(due.due_mask(now, parent, source.action_names, source.supervised_mask)).to_series()
        return {event: bits for event, bits in zip(rows["event_id"], mask, strict=True) if bits}


def test_example_4_2(tmp_path: Path) -> None:
    """One event of the first file; its buy comes with the next day's file, one order too late is outside_window."""
    lake = Shop(tmp_path)
    order = NOON + 24 * HOUR
    first = lake.night(DAY, [impression("r1")], [action("r1", "click", NOON + 40 * SECOND)])
    assert lake.rows().select("event_id", "commit", "actions", "known").rows() == [("r1:1", 1, CLICK, CLICK | BUY)]
    one = lake.bound(first, DAY)
    assert lake.due(one, None) == {"r1:1": CLICK}
    # another impression of the same user, to see what his history has become
    later = datetime(2025, 6, 2, 13, tzinfo=UTC)
    lake.parent = one
    second = lake.night(
        NEXT, [impression("r2", later)], [action("r1", "order", order - SECOND), action("r1", "order", order)]
    )
    rows = lake.rows()
    assert rows.select("event_id", "commit", "actions", "known", "click_at", "buy_at").rows() == [
        ("r1:1", 1, CLICK | BUY, CLICK | BUY, NOON + 40 * SECOND, order - SECOND),
        ("r2:1", 2, 0, CLICK | BUY, None, None),
    ]
    assert first.action_rows is not None
    assert second.action_rows is not None
    assert (first.action_rows.read, first.action_rows.merged) == (1, 1)
    assert (second.action_rows.merged, second.action_rows.quarantined, second.rows.read) == (1, 1, 1)
    assert second.action_reasons == {"outside_window": 1}
    assert lake.table.quarantine(2).select("reason", "feed").rows() == [("outside_window", "actions")]
    two = lake.bound(second, NEXT)
    assert lake.due(two, one) == {"r1:1": BUY, "r2:1": CLICK}
    tokens = build(rows.with_columns(due=pl.Series([BUY, CLICK])), action_names=("click", "buy")).tokens
    history = tokens.filter(pl.col("supervise") == 0).select(
        "actions", "known", pl.col("time").cast(pl.Datetime("us", "UTC"))
    )
    assert history.rows() == [
        (CLICK, CLICK | BUY, datetime(2025, 6, 1, 12, 30, tzinfo=UTC)),
        (BUY, CLICK | BUY, datetime(2025, 6, 2, 11, 59, 59, tzinfo=UTC)),
    ]
    targets = tokens.filter(pl.col("supervise") == 1).select("event_id", "labels", "label_known", "lo", "hi")
    assert targets.rows() == [("r1:1", BUY, BUY, 0, 0), ("r2:1", 0, CLICK, 0, 2)]


def test_a_label_of_days_is_due_once_and_positive(tmp_path: Path) -> None:
    """Case E7: impression on D, click on D+2, window three days: due in the night of D+3, with the click."""
    lake = Shop(tmp_path, click=3 * 86_400)
    days = [DAY + timedelta(days=n) for n in range(5)]
    acted = {days[2]: [action("r1", "click", NOON + 48 * HOUR)]}
    seen = []
    for day in days:
        shown = (
            [impression("r1")] if day == DAY else [impression(f"x{day}", NOON + 24 * HOUR * (day - DAY).days, uid=2)]
        )
        commit = lake.night(day, shown, acted.get(day, [action("nobody", "view", NOON)]))
        now = lake.bound(commit, day)
        seen.append(lake.due(now, lake.parent).get("r1:1", 0) & CLICK)
        lake.parent = now
        assert commit.labels_changed_after_supervision == 0
    assert seen == [0, 0, 0, CLICK, 0]
    row = lake.rows().row(0, named=True)
    assert (row["actions"], row["click_at"]) == (CLICK, NOON + 48 * HOUR)


def test_an_action_may_come_before_and_after_its_impression(tmp_path: Path) -> None:
    """A row without impression waits; late rows join the event of an earlier commit (case E1); both are counted."""
    lake = Shop(tmp_path)
    late = NOON + 12 * HOUR - 600 * SECOND  # ten minutes before midnight UTC, 19:50 in the shop
    first = lake.night(
        DAY,
        [impression("r1", late)],
        [action("r2", "order", NOON), action("r3", "click", NOON), action("r1", "view", late)],
    )
    assert first.action_rows is not None
    assert (first.action_rows.read, first.action_rows.pending, first.action_rows.quarantined) == (3, 1, 2)
    assert first.action_reasons == {"no_action": 1, "no_impression": 1}  # r3's click: its half hour was over
    lake.parent = lake.bound(first, DAY)
    second = lake.night(NEXT, [impression("r2", NOON - HOUR)], [action("r1", "click", late + SECOND)])
    assert second.action_rows is not None
    assert second.action_rows.to_json() == {
        "read": 1,
        "merged": 1,
        "duplicates": 0,
        "pending": 0,
        "quarantined": 0,
        "forgotten": 0,
        "pending_before": 1,
        "carried": {"merged": 1, "duplicates": 0, "pending": 0, "quarantined": 0, "forgotten": 0},
    }
    assert {row[0]: row[1:] for row in lake.rows().select("event_id", "actions", "commit").rows()} == {
        "r1:1": (CLICK, 1),
        "r2:1": (BUY, 2),
    }
    # r1's click was final on the first night, trained on as a miss: it is counted, and the event keeps its commit
    assert second.labels_changed_after_supervision == 1
    assert second.updated == 1


def test_files_that_come_again_change_nothing(tmp_path: Path) -> None:
    """Action rows delivered twice, in one day or on the next, and impressions too, are duplicates."""
    lake = Shop(tmp_path)
    rows = [action("r1", "click", NOON + SECOND), action("r2", "order", NOON), action("lost", "order", NOON + 4 * HOUR)]
    shown = [impression("r1"), impression("r2", uid=2)]
    first = lake.night(DAY, shown, rows, rows)
    assert first.action_rows is not None
    assert (first.action_rows.read, first.action_rows.merged, first.action_rows.duplicates) == (6, 2, 3)
    before = lake.rows()
    second = lake.night(NEXT, [*shown, impression("r3", NOON + 24 * HOUR)], rows)
    assert second.action_rows is not None
    assert (second.action_rows.read, second.action_rows.duplicates, second.action_rows.pending) == (3, 3, 0)
    assert second.action_rows.pending_before == second.action_rows.carried["quarantined"] == 1
    assert lake.rows().filter(pl.col("commit") == 1).equals(before)
    assert (second.rows.duplicates, second.rows.committed, second.updated) == (2, 1, 0)


def test_an_actions_file_that_comes_days_later_is_read_by_the_next_night(tmp_path: Path) -> None:
    """With restate_days a day's delivery counts as changed by a file of either feed; what was there is a duplicate."""
    lake = Shop(tmp_path, source={"restate_days": 3})
    lake.night(DAY, [impression("r1")], [action("r1", "click", NOON)])
    write_actions(tmp_path / "raw", DAY, [action("r1", "order", NOON + HOUR)], part=1)
    second = lake.night(NEXT, [impression("r2", NOON + 24 * HOUR)], [action("r2", "click", NOON + 24 * HOUR)])
    assert second.action_rows is not None
    assert (second.action_rows.read, second.action_rows.merged, second.action_rows.duplicates) == (3, 2, 1)
    assert lake.rows().select("event_id", "actions").rows() == [("r1:1", CLICK | BUY), ("r2:1", CLICK)]
    assert ingesting.restated(lake.config, lake.table, NEXT, lake.config.source.feeds[0]) == []


def test_what_waits_is_known_to_the_commit_alone(tmp_path: Path) -> None:
    """Pending rows stand in a file that the commit names; an interrupted ingestion's file is never seen."""
    lake = Shop(tmp_path)
    first = lake.night(DAY, [impression("r1")], [action("r2", "order", NOON)])
    assert lake.table.pending(first.number)["event_id"].to_list() == ["r2:1"]
    assert lake.table.pending(7).is_empty()
    stray = tmp_path / "home" / "lake" / "pending" / "commit=2" / "stray.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half")
    second = lake.night(NEXT, [impression("r2", NOON)], [action("r1", "view", NOON)])
    assert second.action_rows is not None
    assert second.action_rows.carried["merged"] == 1
    assert lake.table.pending(second.number).is_empty()


def test_a_missing_actions_file_is_a_missing_day(tmp_path: Path) -> None:
    """It stops the night before anything is written, or warns and leaves the actions for later."""
    write_impressions(tmp_path / "raw", DAY, [impression("r1")])
    home = str(tmp_path / "home")
    with pytest.raises(DataContractError, match="2025-06-01 is missing: no file of feed actions"):
        ingesting.preflight(make_config(tmp_path / "raw"), home, DAY)
    lenient = {"source": {"missing_day": "warn"}}
    ingesting.preflight(make_config(tmp_path / "raw", **lenient), home, DAY)
    assert not Path(home).exists()
    lake = Shop(tmp_path, **lenient)
    commit = lake.ingest(DAY)
    assert commit.action_rows is not None
    assert commit.action_rows.read == 0
    assert lake.rows()["known"].to_list() == [CLICK | BUY]


def test_broken_actions_files_are_found_before_the_night_opens(tmp_path: Path) -> None:
    """The check before anything is written reads the actions feed as well."""
    write_impressions(tmp_path / "raw", DAY, [impression("r1")])
    write_actions(tmp_path / "raw", DAY, [action("r1", "click", "no time")])
    with pytest.raises(DataContractError, match="none of the 1 rows read is usable"):
        ingesting.preflight(make_config(tmp_path / "raw"), str(tmp_path / "home"), DAY)
    assert not (tmp_path / "home").exists()


def test_check_tells_what_both_feeds_become(tmp_path: Path) -> None:
    """`daybreak check` shows the columns of both and why action rows would go to quarantine, and writes nothing."""
    write_impressions(tmp_path / "raw", DAY, [impression("r1")])
    write_actions(tmp_path / "raw", DAY, [action("r1", "click", NOON), action("r1", "click", "no time")])
    config = make_config(tmp_path / "raw", lake={"holdout_fraction": 0.9})
    told = checking.check(config, str(tmp_path / "home"), DAY)
    assert told["ok"]
    seen = {one["feed"]: (one["rows"], one["reasons"]) for one in told["sample"]}
    assert seen == {"impressions": (1, {}), "actions": (2, {"bad_time": 1})}
    columns = {column["column"]: column["sql"] for column in told["columns"] if column["feed"] == "actions"}
    positives = [found["message"] for found in told["findings"] if found["where"] == "gate.min_positives"]
    assert positives[0].startswith("about 3 positives of click in 3 nights")  # one a night
    assert columns["buy"] == "kind = 'order' AND at IS NOT NULL"
    assert not (tmp_path / "home").exists()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    acted=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["click", "order"]),
            st.integers(-60, 4000),
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        max_size=10,
    ),
    shown=st.lists(st.integers(0, 1), min_size=4, max_size=4),
)
def test_any_split_over_nights_and_files(
    tmp_path_factory: pytest.TempPathFactory, acted: list[tuple[int, str, int, int, int]], shown: list[int]
) -> None:
    """Impressions and action rows in any of two nights and files end in the same bits and times."""
    events = [impression(f"e{n}", NOON + n * HOUR, uid=n) for n in range(4)]
    rows = [action(f"e{n}", kind, NOON + n * HOUR + at * SECOND) for n, kind, at, _, _ in acted]
    filler = impression("filler", NOON)
    split = Shop(tmp_path_factory.mktemp("split"), source={"lateness_seconds": 7 * 86_400})
    for night, day in enumerate((DAY, NEXT)):
        files = [[row for row, a in zip(rows, acted, strict=True) if a[3:] == (night, file)] for file in (0, 1)]
        found = [event for event, when in zip(events, shown, strict=True) if when == night]
        commit = split.night(day, [filler, *found], *files)
        counts = commit.action_rows
        assert counts is not None
        counts.check()
        assert counts.read == sum(map(len, files))
        assert split.table.pending(commit.number).height == counts.pending + counts.carried["pending"]
    whole = Shop(tmp_path_factory.mktemp("whole"))
    whole.night(DAY, [filler, *events], list(reversed(rows)))
    said = ["event_id", "actions", "known", "click_at", "buy_at"]
    assert split.rows().select(said).equals(whole.rows().select(said))


def test_a_late_row_reads_its_own_days_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that comes 80 days late joins its event, and no file of the days between is opened."""
    lake = Shop(tmp_path)
    opened: list[str] = []
    real = layout.scan

    def recorded(files: pl.DataFrame, *rest: Any, **named: Any) -> pl.LazyFrame:
        opened.extend(files["uri"])
        return real(files, *rest, **named)

    def night(days: int, row: dict[str, Any]) -> Commit:
        when = timedelta(days=days)
        return lake.night(DAY + when, [impression(f"r{1 + days}", NOON + when)], [row])

    night(0, action("r1", "view", NOON))
    night(40, action("r1", "view", NOON))
    (middle,) = {file["uri"] for file in files_of(lake.table) if file["min.shown_at"] > NOON}
    monkeypatch.setattr(layout, "scan", recorded)
    commit = night(80, action("r1", "order", NOON))
    assert commit.action_rows is not None
    assert (commit.action_rows.merged, commit.updated) == (1, 1)
    assert opened
    assert middle not in opened


def files_of(table: EventTable) -> list[dict[str, Any]]:
    """Return the files of the newest version."""
    now = table.at()
    assert now is not None
    return layout.files_of(now).to_dicts()


def test_a_kill_between_files_and_commit_counts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending rows were written, the commit was not: the next attempt sees neither and ends as if it were the first."""
    lake = Shop(tmp_path)
    lake.night(DAY, [impression("r1")], [action("r2", "order", NOON)])
    with monkeypatch.context() as patch:
        patch.setattr("gr_core.lake.quarantine.write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lake.night(NEXT, [impression("r3", NOON + 24 * HOUR)], [action("r4", "order", NOON + 20 * HOUR)])
    assert len(list((tmp_path / "home" / "lake" / "pending").glob("*/*"))) == 2
    again = lake.ingest(NEXT)
    assert again.action_rows is not None
    assert (again.number, again.action_rows.pending, again.action_rows.pending_before) == (2, 1, 1)
    assert lake.ingest(NEXT) == again
    assert lake.table.pending(2)["event_id"].to_list() == ["r4:1"]


def test_retracted_rows_wait_no_longer(tmp_path: Path) -> None:
    """A day that is taken back leaves neither its actions in events nor rows that would join one later."""
    lake = Shop(tmp_path, source={"lateness_seconds": 7 * 86_400})
    lake.night(DAY, [impression("r1")], [action("early", "order", NOON + HOUR)])
    before = lake.rows()
    noon = NOON + 24 * HOUR
    lake.night(NEXT, [impression("r2", noon)], [action("r1", "order", NOON), action("later", "order", noon)])
    assert lake.table.pending(2)["event_id"].to_list() == ["early:1", "later:1"]
    erasing.retract(lake.config, str(tmp_path / "home"), date=NEXT, commit=None, reason="poisoned", at_us=1)
    assert lake.rows().drop("updated").equals(before.drop("updated"))
    assert lake.table.pending(2)["event_id"].to_list() == ["early:1"]
