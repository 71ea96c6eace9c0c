"""The history store: entries come back as they were written, the newest counts, cleaning and purging keep the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from gr_core.errors import FormatError
from gr_core.lake import history, history_entries
from gr_core.lake.history import Cut, HistoryStore
from gr_core.lake.history_entries import HistoryColumns
from gr_core.refs import NEVER

COLUMNS = HistoryColumns(texts=("event_id", "item_id", "kind"), times=("click_at", "like_at"))
TIME = pl.Datetime("us", "UTC")


def rows_of(users: list[str], rng: np.random.Generator, *, clicks: bool = True) -> pl.DataFrame:
    """Return up to three random rows of each user."""
    owner = [user for user in users for _ in range(int(rng.integers(1, 4)))]
    size = len(owner)
    texts = ["", "ü", "kind", None, "a\u0000b"]
    clicked = pl.Series(rng.integers(1, 9, size)).set(pl.Series(rng.random(size) < (0.5 if clicks else 2)), None)
    return pl.DataFrame(
        {
            "user_id": owner,
            "event_id": [f"e{number}" for number in rng.integers(0, 10**9, size)],
            "item_id": [f"i{number}" for number in rng.integers(0, 9, size)],
            "kind": [texts[place] for place in rng.integers(0, 5, size)],
            "shown_at": rng.integers(0, 99, size),
            "visible_at": rng.integers(0, 99, size),
            "actions": rng.integers(0, 4, size).astype(np.int32),
            "known": np.full(size, 3, np.int32),
            "click_at": clicked,
            "like_at": pl.Series([None] * size, dtype=pl.Int64),
        },
        schema_overrides={
            **dict.fromkeys(("user_id", "event_id", "item_id", "kind"), pl.String),
            **dict.fromkeys(("shown_at", "visible_at", "click_at", "like_at"), TIME),
        },
    ).select(COLUMNS.names)


def store_of(folder: Path, bucket: int = 3) -> HistoryStore:
    """Return the store of a bucket."""
    return HistoryStore(str(folder), bucket, COLUMNS, 4)


def floors_of(rows: pl.DataFrame, floor: int = NEVER) -> Any:
    """Return the same floor for every user."""
    return np.full(rows["user_id"].n_unique(), floor)


def cut_of(rows: pl.DataFrame, floors: Any) -> Cut:
    """Return heads alone."""
    return Cut(head=rows, head_floors=floors, deep=rows.clear(), deep_floors=floors[:0])


def stored(store: HistoryStore, version: int, users: list[str], erasures: int = 0) -> dict[str, Any]:
    """Read users' rows at a version, by user."""
    snapshot = store.snapshot(version, 99, erasures)
    assert snapshot is not None
    return by_user(snapshot.read(pl.Series(users)).rows)


def by_user(rows: pl.DataFrame) -> dict[str, Any]:
    """Return each user's rows."""
    return {str(user): own.rows() for (user,), own in rows.group_by("user_id", maintain_order=True)}


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Texts with nulls, empty ones, any characters and beyond 65535 bytes, null times, floors: all as written."""
    rng = np.random.default_rng(0)
    users = [f"user {number} é" for number in range(50)]
    rows = rows_of(users, rng)
    store = store_of(tmp_path)
    store.write_base(7, 2, 0, cut_of(rows, np.arange(50)))
    long = rows_of(["new", "user 3 é"], rng, clicks=False).with_columns(kind=pl.lit("x" * 70_000))
    snapshot = store.snapshot(7, 99, 0)
    assert snapshot is not None
    store.advance(snapshot, 9, 3, cut_of(long, floors_of(long)))

    asked = [*users[::-1], "new", "never seen"]
    newest = store.snapshot(12, 99, 0)
    assert newest is not None
    found = newest.read(pl.Series(asked))

    assert (newest.version, newest.commit) == (9, 3)
    assert found.rows.schema == rows.schema
    assert by_user(found.rows) == by_user(rows) | by_user(long)
    assert dict(found.floors.iter_rows()) == {
        **{user: number for number, user in enumerate(users)},
        "new": NEVER,
        "user 3 é": NEVER,
    }
    assert stored(store, 8, asked) == by_user(rows)


def test_deep_entries_stand_beside_the_heads(tmp_path: Path) -> None:
    """A user's two entries are told apart, superseded apart, and purged together."""
    rng = np.random.default_rng(4)
    head, deep, later = (rows_of(users, rng) for users in (["a", "b", "c"], ["a", "c"], ["a"]))
    store = store_of(tmp_path)
    cut = Cut(head=head, head_floors=np.array([5, NEVER, 7]), deep=deep, deep_floors=np.array([2, 3]))
    store.write_base(1, 1, 0, cut)
    snapshot = store.snapshot(1, 1, 0)
    assert snapshot is not None
    store.advance(snapshot, 2, 2, cut_of(later, floors_of(later, 6)))

    newest = store.snapshot(2, 2, 0)
    assert newest is not None
    users = pl.Series(["a", "b", "c"])
    assert by_user(newest.read(users).rows) == by_user(head) | by_user(later)
    found = newest.read(users, deep=True)
    assert by_user(found.rows) == by_user(deep)
    assert sorted(found.floors.iter_rows()) == [("a", 2), ("c", 3)]
    assert store.purge(["a"], 1) == 3
    left = store.snapshot(2, 2, 1)
    assert left is not None
    assert by_user(left.read(users, deep=True).rows) == {"c": by_user(deep)["c"]}


def test_a_state_is_used_for_its_own_rules_versions_and_erasures_only(tmp_path: Path) -> None:
    """Neither an older version, nor another erasure count, column list or max_history gets a state."""
    store, rows = store_of(tmp_path), rows_of(["a"], np.random.default_rng(1))
    assert store.snapshot(5, 99, 0) is None
    store.write_base(7, 2, 1, cut_of(rows, floors_of(rows)))

    assert store.newest() == (7, 2)
    assert store.snapshot(6, 99, 1) is None
    assert store.snapshot(7, 99, 0) is None
    assert store.snapshot(7, 99, 1) is not None
    assert store.snapshot(7, 1, 1) is None
    assert HistoryStore(str(tmp_path), 3, COLUMNS, 5).snapshot(7, 99, 1) is None
    other = HistoryColumns(texts=("event_id", "item_id"), times=COLUMNS.times)
    assert HistoryStore(str(tmp_path), 3, other, 4).snapshot(7, 99, 1) is None


def nights(
    store: HistoryStore, count: int, touch: Callable[[np.random.Generator], list[str]]
) -> tuple[dict[str, Any], int]:
    """Write a base of 300 users and touch some each night; returns the newest rows and the bytes of touched entries."""
    rng = np.random.default_rng(5)
    rows = rows_of([f"u{number:03}" for number in range(300)], rng)
    store.write_base(0, 0, 0, cut_of(rows, floors_of(rows)))
    newest, touched = by_user(rows), 0
    for version in range(1, count + 1):
        rows = rows_of(sorted(set(touch(rng))), rng, clicks=bool(rng.integers(0, 2)))
        snapshot = store.snapshot(version, 99, 0)
        assert snapshot is not None
        store.advance(snapshot, version, version, cut_of(rows, floors_of(rows)))
        newest |= by_user(rows)
        touched += len(history_entries.encode(rows, COLUMNS, floors_of(rows)).texts)
    return newest, touched


def random_users(rng: np.random.Generator) -> list[str]:
    """Return some users: a few come often, most seldom, new ones too."""
    return [f"u{number:03}" for number in [*rng.integers(0, 20, 8), *rng.integers(0, 320, 8)]]


def test_cleaning_keeps_content_and_bounds_files_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 60 nights levels are merged and dead generations dropped; every user's newest entry stays."""
    monkeypatch.setattr(history, "FANOUT", 4)
    store = store_of(tmp_path)
    newest, _ = nights(store, 60, random_users)

    assert stored(store, 60, list(newest)) == newest
    manifest = store._manifests()[0]
    assert len(manifest.generations) < 12
    assert sum(one.data_bytes for one in manifest.generations) < 3 * sum(one.live_bytes for one in manifest.generations)
    for place, one in enumerate(manifest.generations):  # what is counted as alive is what is found
        users = sum(len(at[0]) for n, at in enumerate(located(store, list(newest))) if n == place)
        assert one.live_users == users
    names = {path.name for path in (tmp_path / "bucket-00003").iterdir()}
    assert len([name for name in names if name.startswith("manifest")]) == 4


def located(store: HistoryStore, users: list[str]) -> list[Any]:
    """Find users in the newest state's generations."""
    snapshot = store.snapshot(10**6, 99, 0)
    assert snapshot is not None
    return snapshot.locate(history_entries.keys_of(users))


@pytest.mark.parametrize("among", [30, 300])
def test_bytes_written_follow_the_touched_entries(tmp_path: Path, among: int) -> None:
    """Over 30 nights at most three times the bytes of the entries touched, whoever is touched."""
    store = store_of(tmp_path)
    users = [f"u{number:03}" for number in range(300)]
    base = store_of(tmp_path / "base")
    nights(base, 0, random_users)

    def touch(rng: np.random.Generator) -> list[str]:
        return [users[place] for place in rng.permutation(among)[:30]]

    before = HistoryStore(str(tmp_path / "once"), 3, COLUMNS, 4)
    rng = np.random.default_rng(1)
    once = rows_of(touch(rng), rng)
    before.write_base(0, 0, 0, cut_of(once, floors_of(once)))
    nights(store, 30, touch)

    assert store.bytes_written - base.bytes_written < 3 * 30 * before.bytes_written


def test_purged_users_are_in_no_file_and_the_others_stay(tmp_path: Path) -> None:
    """After a purge no byte of the user is left, in old states neither; other buckets take the new count."""
    store = store_of(tmp_path)
    newest, _ = nights(store, 6, lambda rng: [*random_users(rng), "u007"])
    secret = {row[1] for rows in (newest["u007"],) for row in rows}
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*.data"))
    assert all(text.encode() in content for text in secret)

    assert store.purge(["u007", "stranger"], 1) == 7
    assert store.purge(["u007"], 1) == 0

    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*.data"))
    assert not any(text.encode() in content for text in secret)
    del newest["u007"]
    assert stored(store, 6, [*newest, "u007"], erasures=1) == newest
    assert store.snapshot(6, 99, 0) is None
    assert store.purge([], 2) == 0
    assert stored(store, 6, list(newest), erasures=2) == newest
    assert store.purge([], 4) == 0
    assert store.snapshot(6, 99, 4) is None
    assert not list(tmp_path.rglob("*.data"))


def test_users_with_like_hashes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that share their first 64 bits are found by the rest."""

    def alike(users: list[str], *, deep: bool = False) -> Any:
        keys = np.zeros(len(users), dtype=history_entries.KEY)
        keys["high"], keys["low"] = [len(user) for user in users], [int(user[1:]) + 99 * deep for user in users]
        return keys

    monkeypatch.setattr(history_entries, "keys_of", alike)
    rows = rows_of([f"u{number}" for number in range(40)], np.random.default_rng(3))
    store = store_of(tmp_path)
    store.write_base(1, 1, 0, cut_of(rows, floors_of(rows)))

    assert stored(store, 1, [f"u{number}" for number in range(60)]) == by_user(rows)


def test_an_empty_bucket_has_a_state(tmp_path: Path) -> None:
    """A bucket without rows is written, read and advanced like any other."""
    store, none = store_of(tmp_path), rows_of([], np.random.default_rng(0))
    store.write_base(1, 1, 0, cut_of(none, floors_of(none)))
    assert stored(store, 1, ["a"]) == {}
    some = rows_of(["a"], np.random.default_rng(0))
    snapshot = store.snapshot(2, 99, 0)
    assert snapshot is not None
    store.advance(snapshot, 2, 2, cut_of(some, floors_of(some)))

    assert stored(store, 2, ["a", "b"]) == by_user(some)


def test_a_flipped_byte_of_an_entry_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    """Every byte of a data file is covered by the checksum of the entry that it belongs to."""
    store, rows = store_of(tmp_path), rows_of(["a", "b"], np.random.default_rng(2))
    store.write_base(1, 1, 0, cut_of(rows, floors_of(rows)))
    (path,) = tmp_path.rglob("*.data")
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        snapshot = store.snapshot(1, 99, 0)
        assert snapshot is not None
        with pytest.raises(FormatError, match="damaged"):
            snapshot.read(pl.Series(["a", "b"]))
