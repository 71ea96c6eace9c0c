"""Rows that leave the event table: a forgotten user's from every version, a retracted commit's into quarantine."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable

from gr_core.hashing import bucket_of
from gr_core.lake import tombstones
from gr_core.lake.events import EventTable, erasure
from gr_core.lake.events.retraction import Asked, Ingestion, Retraction, TakeBack, retractions
from tests.events import CLICK, LIKE, NOON, batch, event, make_config, masks, table

USER, OTHER = "person-7f3a", "u"
BUCKETS = 4


def filled(path: Path, *, neighbours: bool = True) -> EventTable:
    """Return a table of two commits, three events of the user among others of the same bucket and of others."""
    config = make_config()
    events = table(path, config)
    near = [name for name in map(str, range(99)) if bucket_of(name, BUCKETS) == bucket_of(USER, BUCKETS)][:2]
    others = [*(near if neighbours else []), OTHER]
    others = [name for name in others if neighbours or bucket_of(name, BUCKETS) != bucket_of(USER, BUCKETS)]
    for number in (1, 2):
        own = [event(f"own-{number}-{place}", USER) for place in range(number)]
        rest = [event(f"{name}-{number}", name) for name in others]
        events.ingest(f"2025-06-0{number}", batch(config, *own, *rest), parent=None)
    return events


def forget(events: EventTable, user: str = USER) -> int:
    """Forget a user as the stage does; return the rows removed."""
    tombstones.add(events.lake, user, BUCKETS, at_us=1, versions=[])
    removed = erasure.forget_rows(events.at, events.uri, user, BUCKETS)
    erasure.forget_files(events.at, events.uri, user, BUCKETS)
    return removed


def holders(folder: Path, text: str) -> list[str]:
    """Return the files below a folder that hold a text: in a column of a table, in their bytes, or in their name."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.suffix == ".parquet":
            content = repr(pl.read_parquet(path, hive_partitioning=False).to_dicts())
        elif path.suffix == ".arrow":
            content = repr(pl.read_ipc(path).to_dicts())
        else:
            content = path.read_bytes().decode(errors="replace")
        if text in content or text in path.name:
            found.append(path.relative_to(folder).as_posix())
    return found


def test_a_forgotten_user_is_in_no_file(tmp_path: Path) -> None:
    """Rows go from the newest version, from old versions' files and from what Delta's log says of them."""
    events = filled(tmp_path)
    before = events.read(events.delta_version())
    assert holders(tmp_path, USER)

    assert forget(events) == 3

    assert holders(tmp_path, USER) == []
    after = events.read(events.delta_version())
    assert after.equals(before.filter(pl.col("user_id") != USER))
    assert events.erasures() == 1


@pytest.mark.parametrize("user", ["\U00020bb7\u91ce", "zo\u00eb", 'a"b\\c', "a\tb", "\U0001f600"])
def test_an_id_of_any_letters_leaves_the_log(tmp_path: Path, user: str) -> None:
    """However JSON spells an id inside JSON, what the log says of deleted files does not tell it."""
    config = make_config()
    events = table(tmp_path, config)
    for number in (1, 2):
        events.ingest(
            f"n{number}", batch(config, event(f"own-{number}", user), event(f"e{number}", OTHER)), parent=None
        )

    def told() -> str:
        logs = (tmp_path / "lake" / "events" / "_delta_log").glob("*.json")
        actions = [json.loads(line) for path in logs for line in path.read_bytes().splitlines()]
        return repr([json.loads(action["add"]["stats"]) for action in actions if "add" in action])

    assert repr(user)[1:-1] in told()
    assert forget(events, user) == 2
    assert repr(user)[1:-1] not in told()


def test_the_version_is_marked_and_counted(tmp_path: Path) -> None:
    """One Delta commit removes him, with its number and the rows in its metadata, and nothing of who he was."""
    events = filled(tmp_path)
    version = events.delta_version()
    forget(events)

    assert events.delta_version() == version + 1
    told = DeltaTable(events.uri).history(1)[0]
    assert told["daybreak.erasure"] == "1"
    assert json.loads(told["daybreak.erased"]) == {"kind": "forget", "rows": 3}
    assert [commit.number for commit in events.commits()] == [1, 2]


def test_forgetting_twice_changes_nothing_more(tmp_path: Path) -> None:
    """The second time finds no row and makes no version; neither does a user who never was."""
    events = filled(tmp_path)
    forget(events)
    version = events.delta_version()

    assert forget(events) == 0
    assert forget(events, "nobody") == 0
    assert events.delta_version() == version


def test_a_bucket_of_one_user_becomes_empty(tmp_path: Path) -> None:
    """With nobody else in the bucket its files just go."""
    events = filled(tmp_path, neighbours=False)

    assert forget(events) == 3
    assert holders(tmp_path, USER) == []
    assert USER not in events.read(events.delta_version())["user_id"].to_list()


def test_what_a_killed_forgetting_left_is_hidden_and_then_finished(tmp_path: Path) -> None:
    """From the tombstone on no read shows him, whatever its columns; running it again removes the rest."""
    events = filled(tmp_path)
    tombstones.add(events.lake, USER, BUCKETS, at_us=1, versions=[])
    newest, bucket = events.delta_version(), bucket_of(USER, BUCKETS)

    assert USER not in events.read(newest)["user_id"].to_list()
    assert not [e for e in events.read(newest, columns=["event_id"])["event_id"] if e.startswith("own")]
    assert events.read(newest, users=[USER]).is_empty()
    assert events.read_users(newest, bucket=bucket, users=[USER]).is_empty()
    since = events.read_since(newest, bucket=bucket, commit_after=0, shown_from_us=None)
    assert since.height
    assert USER not in since["user_id"].to_list()

    assert erasure.forget_rows(events.at, events.uri, USER, BUCKETS) == 3
    assert holders(tmp_path, USER)  # killed here: old files remain
    assert forget(events) == 0
    assert holders(tmp_path, USER) == []


def test_a_version_pinned_before_is_read_without_him_and_without_later_nights(tmp_path: Path) -> None:
    """The forgetting version stands in for it, up to the commit that the pinned one had."""
    events = filled(tmp_path)
    first = next(commit for commit in events.commits() if commit.number == 1)
    before = events.read(first.delta_version)
    forget(events)

    after = events.read(first.delta_version)
    assert after.equals(before.filter(pl.col("user_id") != USER))
    assert events.pin(first) == events.delta_version()
    read = EventTable(events.uri, events.config, up_to=1).read(events.pin(first))
    assert read.equals(after)


def test_what_comes_after_a_forgetting_is_pinned_as_ever(tmp_path: Path) -> None:
    """Only versions before the forgetting are read as another one."""
    events = filled(tmp_path)
    forget(events)
    made = events.ingest("2025-06-03", batch(events.config, event("new")), parent=None)
    events.ingest("2025-06-04", batch(events.config, event("newer")), parent=None)

    assert events.pin(made) == made.delta_version
    assert sorted(events.read(made.delta_version)["commit"].unique()) == [1, 2, 3]


def test_checkpoints_of_the_log_forget_too(tmp_path: Path) -> None:
    """A checkpoint holds statistics of files; it is made anew, and the table opens at every version."""
    events = filled(tmp_path)
    DeltaTable(events.uri).create_checkpoint()
    assert [name for name in holders(tmp_path, USER) if "checkpoint" in name]

    forget(events)

    assert holders(tmp_path, USER) == []
    assert [commit.number for commit in events.commits()] == [1, 2]
    assert DeltaTable(events.uri, version=1).version() == 1


def asked(events: EventTable, *commits: int) -> Asked:
    """Ask for all numbers of some ingestions."""
    whole = tuple(Ingestion.of(one) for one in events.commits() if one.number in commits)
    return Asked(numbers=frozenset(n for one in whole for n in one.numbers), whole=whole)


def attempt(events: EventTable, *commits: int) -> TakeBack:
    """Return an attempt to retract commits; every user is trained on."""
    return TakeBack(
        events.at,
        events.uri,
        asked(events, *commits),
        keep=lambda bucket, rows: f"{bucket}: {' '.join(sorted(rows['event_id']))}",
        trained=lambda rows: pl.repeat(value=True, n=rows.height, eager=True, dtype=pl.Boolean),
    )


def take_back(events: EventTable, *commits: int) -> Retraction:
    """Retract commits."""
    told = attempt(events, *commits).run("poison")
    assert told is not None
    return told


def late(path: Path) -> EventTable:
    """Return a table whose second commit has an event of its own and changes two of the first."""
    config = make_config()
    events = table(path, config)
    one = [event("a", "p"), event("b", "q"), event("c", "r", actions=CLICK)]
    events.ingest("2025-06-01", batch(config, *one), parent=None)
    two = [event("a", "p", actions=LIKE, like_at=NOON), event("b", "q", actions=CLICK), event("d", "p")]
    events.ingest("2025-06-02", batch(config, *two), parent=None)
    return events


def test_a_retracted_commit_leaves_the_table_as_it_was_before(tmp_path: Path) -> None:
    """Its rows go, and what it changed in earlier events is undone, in one Delta commit."""
    events = late(tmp_path)
    before = events.read(1)

    told = take_back(events, 2)

    assert (told.rows, told.restored, told.kept) == (1, 2, 0)
    assert events.read(events.delta_version()).equals(before)
    assert events.erasures() == 1
    newest = events.at()
    assert newest is not None
    assert retractions(newest) == [told]
    assert told.earliest_us == {"2": round(NOON.timestamp() * 1e6)}
    assert [text.partition(": ")[2] for text in told.quarantine] == ["d"]
    assert masks(events.read(2))["d"] == (0, 3)  # a pinned version is what it was


def test_what_a_later_commit_changed_again_is_kept_and_counted(tmp_path: Path) -> None:
    """The row's content cannot be told apart any more, so it stays."""
    events = late(tmp_path)
    events.ingest("2025-06-03", batch(events.config, event("b", "q", actions=CLICK | LIKE)), parent=None)

    told = take_back(events, 2)

    assert (told.rows, told.restored, told.kept) == (1, 1, 1)
    assert masks(events.read(events.delta_version())) == {"a": (0, 3), "b": (3, 3), "c": (1, 3)}


def test_what_is_too_old_to_be_restored_is_kept_and_counted(tmp_path: Path) -> None:
    """Where vacuum removed the files from before the commit, changed events keep their content."""
    events = late(tmp_path)
    DeltaTable(events.uri).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    told = take_back(events, 2)

    assert (told.rows, told.restored, told.kept) == (1, 0, 2)
    assert masks(events.read(events.delta_version())) == {"a": (2, 3), "b": (1, 3), "c": (1, 3)}


def test_a_commit_that_only_changed_can_be_retracted(tmp_path: Path) -> None:
    """No row goes, all that it changed is undone."""
    config = make_config()
    events = table(tmp_path, config)
    events.ingest("2025-06-01", batch(config, event("a", "p")), parent=None)
    before = events.read(1)
    events.ingest("2025-06-02", batch(config, event("a", "p", actions=CLICK)), parent=None)

    told = take_back(events, 2)

    assert (told.rows, told.restored) == (0, 1)
    assert events.read(events.delta_version()).equals(before)


def test_two_commits_are_undone_together(tmp_path: Path) -> None:
    """What both changed in one event is as before the first of them."""
    events = late(tmp_path)
    before = events.read(1)
    events.ingest("2025-06-03", batch(events.config, event("b", "q", actions=CLICK | LIKE)), parent=None)

    told = take_back(events, 2, 3)

    assert (told.rows, told.restored, told.kept) == (1, 2, 0)
    assert events.read(events.delta_version()).equals(before)


def test_files_without_such_rows_are_left_alone(tmp_path: Path) -> None:
    """Only files that hold rows that go or change are written anew, and those of the commit alone just go."""
    events = late(tmp_path)
    events.ingest("2025-06-03", batch(events.config, event("x", "p"), event("y", "q")), parent=None)
    table = events.at()
    assert table is not None
    before = set(table.file_uris())

    take_back(events, 3)

    table = events.at()
    assert table is not None
    after = set(table.file_uris())
    assert after < before
    assert set(events.read(events.delta_version())["event_id"]) == {"a", "b", "c", "d"}


def test_rows_stay_in_order_in_their_files(tmp_path: Path) -> None:
    """Reads of few users skip by it."""
    events = filled(tmp_path)
    forget(events)
    take_back(events, 2)

    table = events.at()
    assert table is not None
    for uri in table.file_uris():
        rows = pl.read_parquet(uri.removeprefix("file://"), hive_partitioning=False)
        assert rows.equals(rows.sort("user_id", "shown_at", "event_id"))


def test_another_writer_in_between_is_noticed(tmp_path: Path) -> None:
    """The version a removal says it makes is the one it makes, or it is not made, and no file is left."""
    events = late(tmp_path)
    stale = attempt(events, 2)
    events.ingest("2025-06-03", batch(events.config, event("x", shown_at=NOON + timedelta(days=1))), parent=None)
    files = sorted(tmp_path.rglob("*.parquet"))

    assert stale.run("poison") is None
    assert sorted(tmp_path.rglob("*.parquet")) == files
    assert events.erasures() == 0
    assert {"d", "x"} <= set(events.read(events.delta_version())["event_id"])
    assert take_back(events, 2).rows == 1


def test_nothing_to_take_back_makes_no_version(tmp_path: Path) -> None:
    """A second time finds no row and nothing changed."""
    events = late(tmp_path)
    take_back(events, 2)
    version = events.delta_version()

    told = take_back(events, 2)

    assert (told.rows, told.restored, told.kept) == (0, 0, 0)
    assert events.delta_version() == version


def restated(path: Path, restate: str) -> EventTable:
    """Return a table whose second ingestion delivers the first day again, changed, beside its own day."""
    config = make_config(restate=restate, restate_days=2)
    events = table(path, config)
    events.ingest("2025-06-01", batch(config, event("a", "p"), event("b", "q")), parent=None)
    again = [event("a", "p", actions=CLICK), event("new", "q"), event("d", "p")]
    two = batch(config, *again)
    two = replace(
        two,
        files=pl.Series(["first", "first", "second"]),
        uris=("first", "second"),
        file_days=(0, 1),
        inputs={"2025-06-01": "x", "2025-06-02": "y"},
    )
    events.ingest("2025-06-02", two, parent=None)
    return events


@pytest.mark.parametrize("restate", ["update", "replace"])
def test_an_ingestion_that_restated_a_day_is_undone_whole(tmp_path: Path, restate: str) -> None:
    """Its own rows and those of the restated day go; what it changed or replaced of that day is back."""
    events = restated(tmp_path, restate)
    before, now = events.read(1), events.read(events.delta_version())
    assert set(now["event_id"]) == {"a", "new", "d"} | ({"b"} if restate == "update" else set())
    assert Ingestion.of(events.commits()[1]).numbers == {2, 3}

    told = take_back(events, 3)

    assert (told.rows, told.restored, told.kept) == (2, 1 if restate == "update" else 2, 0)
    assert events.read(events.delta_version()).equals(before)


def test_a_day_goes_with_what_was_delivered_again(tmp_path: Path) -> None:
    """All numbers that a day's rows came under are taken back together, and nothing of the other day."""
    events = restated(tmp_path, "update")
    first, numbers = events.commits()[0], events.delivered("2025-06-01")[1]
    assert numbers == [1, 2]

    asked = Asked(numbers=frozenset(numbers), whole=(Ingestion.of(first),))
    told = TakeBack(
        events.at, events.uri, asked, keep=lambda _bucket, _rows: "", trained=lambda rows: rows["user_id"] != ""
    ).run("poison")

    assert told is not None
    assert told.rows == 3
    assert set(events.read(events.delta_version())["event_id"]) == {"d"}
