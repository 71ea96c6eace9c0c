"""The embedded world as a feed: what its files hold, which faults, and when."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from gr_core.config import load_config
from gr_core.data import synthetic
from gr_core.data.world import WINDOW_SECONDS, day_end_ms

SMALL = synthetic.World(num_users=300, num_items=120, sessions_per_user_day=1.2, bot_events=50)
START = SMALL.start
MS = 1000
DAY = 86_400 * MS


def day(number: int) -> date:
    return START + timedelta(days=number)


def read(root: Path, number: int, world: synthetic.World = SMALL) -> list[dict[str, Any]]:
    """Return the raw rows of a day's files."""
    return [row for path in synthetic.ensure_day(root, world, day(number)) for row in pq.read_table(path).to_pylist()]


def shown_ms(row: dict[str, Any]) -> int:
    return int(np.datetime64(row["shown_at"], "ms").astype(np.int64))


def is_good(row: dict[str, Any]) -> bool:
    """Tell whether a row is none of the faults (they have ids of their own)."""
    return "-x" not in row["event_id"]


def digests(paths: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def outcomes(root: Path, number: int, world: synthetic.World) -> dict[str, dict[str, Any]]:
    """Return the newest row of each event shown on a day: what the feed says once all windows are over."""
    found: dict[str, dict[str, Any]] = {}
    for later in range(3):
        for row in read(root, number + later, world):
            if is_good(row) and row["event_id"].startswith(f"{day(number):%Y%m%d}-"):
                found[row["event_id"]] = row
    return found


def test_files_depend_on_the_world_and_the_day_alone(tmp_path: Path) -> None:
    """Equal bytes in another order of days, in a fresh process, and after 400 days; other bytes for another seed."""
    forward = [digests(synthetic.ensure_day(tmp_path / "a", SMALL, day(k))) for k in (0, 1, 3, 400)]
    backward = [digests(synthetic.ensure_day(tmp_path / "b", SMALL, day(k))) for k in (400, 3, 1, 0)][::-1]
    code = (
        "import sys; from datetime import date; from gr_core.data.synthetic import World, ensure_day\n"
        "w = World(num_users=300, num_items=120, sessions_per_user_day=1.2, bot_events=50)\n"
        "ensure_day(sys.argv[1], w, date.fromisoformat(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c"), day(3).isoformat()], check=True)
    fresh = digests(sorted((tmp_path / "c").rglob("*.parquet")))
    other = digests(synthetic.ensure_day(tmp_path / "d", replace(SMALL, seed=1), day(3)))

    assert forward == backward
    assert forward[2] == fresh
    assert not set(forward[2]) & set(other)


def test_files_that_are_there_are_left_alone(tmp_path: Path) -> None:
    """Only what is missing is written, nothing temporary stays, and there is nothing before the first day."""
    first, second = synthetic.ensure_day(tmp_path, SMALL, START)
    expected = second.read_bytes()
    first.write_bytes(b"by hand")
    second.unlink()

    assert synthetic.ensure_day(tmp_path, SMALL, START) == [first, second]
    assert first.read_bytes() == b"by hand"
    assert second.read_bytes() == expected
    assert sorted(first.parent.iterdir()) == [first, second]
    assert synthetic.ensure_day(tmp_path, SMALL, START - timedelta(days=1)) == []


def test_the_config_reads_the_feed() -> None:
    """conf/world.toml names only raw columns that exist, the world's windows, and sizes of the default world."""
    source = load_config(Path(__file__).parents[3] / "conf" / "world.toml").source
    (feed,) = source.feeds
    times = [feed.shown_at, *feed.action_times.values()]
    named = {*feed.columns.values(), *feed.actions.values(), *feed.side.values(), *(t.column for t in times if t)}
    assert source.world is not None

    assert {*named, feed.event_id} == set(synthetic.RAW_SCHEMA.names)
    assert {a.name: a.attribution_window_seconds for a in source.actions} == WINDOW_SECONDS
    assert synthetic.World.of(source.world) == synthetic.World()
    assert source.world.bot_events > source.daily_cap


def test_planted_faults_are_counted(tmp_path: Path) -> None:
    """Every kind of bad row stands in the file as often as `day_counts` says, and the counts add up."""
    rows = read(tmp_path, 4)
    counts = synthetic.day_counts(SMALL, day(4))
    end = day_end_ms(day(4))
    seen = Counter(row["event_id"] for row in rows)
    good = [row for row in rows if is_good(row)]
    timed = [row for row in rows if row["shown_at"] not in (None, "yesterday")]
    skewed = sorted(shown_ms(row) - end for row in timed if shown_ms(row) > end)

    assert len(rows) == counts["read"]
    parts = ("first", "late", "again", "duplicates", *synthetic.FAULTS)
    assert sum(counts[name] for name in parts) == counts["read"]
    assert sum(row["user_id"] is None for row in rows) == counts["null_user"] == 3
    assert sum(row["item_id"] is None for row in rows) == counts["null_item"] == 3
    assert sum(row["shown_at"] is None for row in rows) == counts["null_time"] == 2
    assert sum(row["shown_at"] == "yesterday" for row in rows) == counts["bad_time"] == 2
    assert len(skewed) == counts["clock_skew"] == 4
    assert skewed[0] > 7200 * MS
    assert skewed[-1] == 400 * DAY
    assert sum(count - 1 for count in seen.values()) == counts["duplicates"] > 0
    assert sum(row["user_id"] == "u300" for row in good) >= counts["bot"] == 50
    assert {row["event_id"] for row in rows if not is_good(row)} == {f"{day(4):%Y%m%d}-x{k}" for k in range(14)}


def test_duplicates_are_equal_and_rows_come_in_no_order(tmp_path: Path) -> None:
    """A row that stands twice says the same twice, and files are sorted by nothing."""
    rows = [row for row in read(tmp_path, 2) if is_good(row)]
    by_id: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_id.setdefault(row["event_id"], []).append(row)
    times = np.diff([shown_ms(row) for row in rows])

    assert all(row == same[0] for same in by_id.values() for row in same)
    assert 0.4 < (times > 0).mean() < 0.6


def test_a_file_knows_what_happened_before_its_day_ended(tmp_path: Path) -> None:
    """An action stands in the file of its own day for the first time; late events bring theirs with them."""
    delivered: dict[str, dict[str, Any]] = {}
    updates = {"click": 0, "like": 0, "purchase": 0}
    late = Counter[int]()
    for number in range(6):
        end = day_end_ms(day(number))
        for row in {row["event_id"]: row for row in read(tmp_path, number) if is_good(row)}.values():
            old = delivered.get(row["event_id"])
            if old is None:
                late[(end - 1 - shown_ms(row)) // DAY] += 1
            gained = 0
            for action, window in WINDOW_SECONDS.items():
                assert row[action] == (row[f"{action}_ms"] is not None)
                if row[action]:
                    assert shown_ms(row) <= row[f"{action}_ms"] < min(end, shown_ms(row) + window * MS)
                if old is not None and row[action] and not old[action]:
                    assert row[f"{action}_ms"] >= end - DAY
                    updates[action] += 1
                    gained += 1
                assert old is None or row[action] >= old[action]
            assert old is None or gained
            delivered[row["event_id"]] = row

    assert min(updates.values()) > 0
    assert updates["purchase"] > updates["click"]
    assert set(late) == {0, 1, 2}
    assert 0.005 < (late[1] + late[2]) / late.total() < 0.02


def test_no_action_is_lost(tmp_path: Path) -> None:
    """Three files tell all that the truth drew for a day's events, at the rates of their probabilities."""
    world = replace(SMALL, num_users=1500)
    rows = outcomes(tmp_path, 3, world)
    table = synthetic.truth(world, day(3)).to_pydict()

    assert sorted(rows) == sorted(table["event_id"])
    assert [rows[event]["user_id"] for event in table["event_id"]] == table["user_id"]
    for action in WINDOW_SECONDS:
        expected = np.array(table[action])
        taken = np.array([rows[event][action] for event in table["event_id"]])
        spread = np.sqrt((expected * (1 - expected)).sum())
        assert abs(taken.sum() - expected.sum()) < 4 * spread
    rates = [np.mean(table[action]) for action in WINDOW_SECONDS]
    assert 0.15 < rates[0] < 0.3
    assert 0.02 < rates[1] < 0.06
    assert 0.01 < rates[2] < 0.03


def test_a_session_is_over_before_it_is_visible(tmp_path: Path) -> None:
    """Sessions last less than the visibility delay, and one is visible as a whole when the user's next begins."""
    times: dict[str, dict[str, list[int]]] = {}
    for number in range(3):
        for row in outcomes(tmp_path, number, SMALL).values():
            if row["user_id"] != "u300":
                times.setdefault(row["user_id"], {}).setdefault(row["request_id"], []).append(shown_ms(row))
    for sessions in times.values():
        spans = sorted((min(shown), max(shown)) for shown in sessions.values())
        assert all(end - begin < 600 * MS for begin, end in spans)
        assert all(before[1] + 600 * MS < after[0] for before, after in itertools.pairwise(spans))


def test_items_are_born_and_die_for_good(tmp_path: Path) -> None:
    """No item is shown before its birth or after its death, and none changes its category or creator."""
    alive: dict[str, list[int]] = {}
    traits: dict[str, set[tuple[str, str]]] = {}
    days = [0, 1, 2, 20, 21, 40, 41, 60, 80]
    for place, number in enumerate(days):
        for row in read(tmp_path, number):
            if is_good(row) and row["event_id"].startswith(f"{day(number):%Y%m%d}-"):
                traits.setdefault(row["item_id"], set()).add((row["category"], row["creator"]))
                places = alive.setdefault(row["item_id"], [])
                if place not in places:
                    places.append(place)
    spans = {item: days[places[-1]] - days[places[0]] for item, places in alive.items()}

    assert all(len(values) == 1 for values in traits.values())
    assert max(spans.values()) <= 60
    assert len(alive) > 2 * SMALL.num_items
    # An item's place in the catalogue holds one item at a time, numbered upwards.
    for slot in range(SMALL.num_items):
        places = sorted((int(item[1:]), alive[item]) for item in alive if int(item[1:]) % SMALL.num_items == slot)
        assert all(a[1][-1] < b[1][0] for a, b in itertools.pairwise(places))


def test_the_command_needs_numpy_and_pyarrow_alone(tmp_path: Path) -> None:
    """`python -m gr_core.data.synthetic` and the feed import neither Polars, torch nor pydantic."""
    code = (
        "import sys; from datetime import date; from gr_core.data import synthetic\n"
        "synthetic.main(['--out', sys.argv[1], '--users', '20', '--preset', 'ads', '--max-history', '40'])\n"
        "synthetic.ensure_day(sys.argv[1], synthetic.World(num_users=20), date(2025, 6, 2))\n"
        "loaded = {'polars', 'torch', 'pydantic', 'fsspec', 'deltalake'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    said = json.loads(done.stdout)

    assert said["run"] == str(tmp_path / "RUN.json")
    assert said["packs"]["train"]["num_segments"] == 20
