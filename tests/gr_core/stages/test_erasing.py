"""Forget and retract on nights of a tiny feed: what goes, what stays, what the next night learns, after kills too."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.errors import UsageError
from gr_core.hashing import is_holdout
from gr_core.lake.entries import Entry
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, champion, nights
from gr_core.lake.lock import night_lock
from gr_core.stages import erasing, judging, outcome
from tests.gr_core.lake.test_erasure import holders
from tests.plain import run

FIRST, SECOND, THIRD = (tiny.FIRST_DAY + timedelta(days=n) for n in range(3))
ROWS = 200
REGISTRY = "gr_core.registry.mlflow_store.MlflowStore"


def person(number: int) -> str:
    """Return a user's id that stands nowhere by chance."""
    return f"person-{number:02d}-k"


HIM = next(person(number) for number in range(40) if not is_holdout(person(number), 0.25))


def write_day(root: Path, day: date, *, poisoned: bool = False) -> None:
    """Write a raw day of users with names; a poisoned one turns every click, of some events of the day before too."""
    path = tiny.write_day(root, day, rows=ROWS)
    table = pq.read_table(path)
    users = pa.array([person(number) for number in table["uid"].to_pylist()])
    table = table.set_column(table.column_names.index("uid"), "uid", users)
    if poisoned:
        before = pq.read_table(root / "log" / f"date={day - timedelta(days=1)}" / "part-0.parquet").slice(10, 30)
        table = pa.concat_tables([table, before])
        turned = pa.array([not clicked for clicked in table["clicked"].to_pylist()])
        table = table.set_column(table.column_names.index("clicked"), "clicked", turned)
    pq.write_table(table, path)


def conclude(config: Path, home: Path, day: date, version: int) -> dict[str, Any]:
    """Run a night, register its checkpoint in the journal alone, promote and finish it."""
    night, done = run(config, home, day, stop_after="evaluate")
    journal = night.journal
    payload = judging.registration(night, version, done["train"], done["vocabulary"])
    journal.append("registered", night.key, payload, at_us=1)
    before = champion(journal.entries())
    decided = {"decision": "promote", "reasons": ["gate passed"], "version": version}
    journal.append("decided", night.key, {**decided, "previous": before.version if before else None}, at_us=1)
    finished = {"state": "completed", "bound": done["ingest"]["bound"], "status": {}}
    journal.append("finished", night.key, finished, at_us=1)
    return done


class Registry:
    """Stands in for MLflow; remembers what the aliases were set to."""

    aliases: dict[str, int | None]

    def __init__(self, *_args: str) -> None:
        return

    def repair(self, **aliases: int | None) -> dict[str, int | None]:
        """Set aliases, as the store does."""
        Registry.aliases = aliases
        return aliases


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep MLflow out: opening its database costs seconds."""
    monkeypatch.setattr(REGISTRY, Registry)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a config, the home after a good night, and the home after a poisoned second one; tests copy them."""
    folder = tmp_path_factory.mktemp("world")
    config = tiny.make(folder, days=0)
    for day in (FIRST, SECOND, THIRD):
        write_day(folder / "raw", day, poisoned=day == SECOND)
    one, two = folder / "one", folder / "two"
    conclude(config, one, FIRST, 1)
    shutil.copytree(one, two)
    conclude(config, two, SECOND, 2)
    return config, one, two


@pytest.fixture
def home(world: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the home after the poisoned night."""
    shutil.copytree(world[2], tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def clean_digest(world: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the third day's weights in a world that never had the second day."""
    config, one, _ = world
    home = tmp_path_factory.mktemp("clean") / "home"
    shutil.copytree(one, home)
    return str(run(config, home, THIRD, stop_after="train")[1]["train"]["digest"])


def entries_of(home: Path) -> list[Entry]:
    return Journal(str(home / "lake" / "journal")).entries()


def table_of(config: Path, home: Path) -> EventTable:
    return EventTable(str(home / "lake" / "events"), load_config(config))


def retract(config: Path, home: Path, day: date | None = SECOND, commit: int | None = None) -> dict[str, Any]:
    return erasing.retract(load_config(config), str(home), date=day, commit=commit, reason="bots", at_us=7)


def forget(config: Path, home: Path, user: str = HIM) -> dict[str, Any]:
    return erasing.forget(load_config(config), str(home), user, at_us=7)


def test_after_a_retraction_the_next_night_learns_as_if_the_day_had_not_been(
    world: tuple[Path, Path, Path], home: Path, clean_digest: str
) -> None:
    """A poisoned day is promoted and retracted: the next night's weights are those of a world without it."""
    config = world[0]
    told = retract(config, home)

    assert told == {"date": "2025-06-02", "reason": "bots", "rows": ROWS, "tainted": [2], "next_parent": 1}
    night, done = run(config, home, THIRD, stop_after="train")
    assert night.parent is not None
    assert night.parent.version == 1
    assert done["train"]["digest"] == clean_digest


def test_an_unfinished_night_that_started_from_a_tainted_version_starts_anew(
    world: tuple[Path, Path, Path], home: Path, clean_digest: str
) -> None:
    """What it had made of the poisoned rows is made again, and its parent is the untainted one from then on."""
    config = world[0]
    night, _ = run(config, home, THIRD, stop_after="pack")
    assert night.parent is not None
    assert night.parent.version == 2

    retract(config, home)

    night, done = run(config, home, THIRD, stop_after="train")
    assert night.parent is not None
    assert night.parent.version == 1
    assert done["train"]["digest"] == clean_digest
    assert run(config, home, THIRD, stop_after="ingest")[0].parent == night.parent


def test_a_retraction_is_told_everywhere(world: tuple[Path, Path, Path], home: Path) -> None:
    """Quarantine holds the rows, the journal the entry, the nights their reasons, the registry the aliases."""
    config = world[0]
    retract(config, home, None, commit=2)

    entry = entries_of(home)[-1]
    assert (entry.kind, entry.night) == ("retracted", "2025-06-02")
    assert (entry.payload["rows"], entry.payload["restored"], entry.payload["kept"]) == (ROWS, 30, 0)
    reasons = nights(entries_of(home))["2025-06-02"].reasons
    assert reasons[-1] == "commit 2 was retracted: bots; its version 2 is tainted"
    done = outcome.finished(str(home), "2025-06-02")
    assert done is not None
    assert done["gate"] == "promoted"
    assert Registry.aliases == {"champion": 1, "previous": None, "challenger": 2}
    rows = pl.concat([pl.read_parquet(path) for path in (home / "lake" / "quarantine").rglob("*.parquet")])
    assert rows["reason"].to_list() == ["retracted"] * ROWS
    assert table_of(config, home).read(1).equals(table_of(config, home).read(table_of(config, home).delta_version()))


def test_retracting_the_first_day_leaves_no_parent(world: tuple[Path, Path, Path], home: Path) -> None:
    """All versions were trained on it: the next night is a first one."""
    config = world[0]
    told = retract(config, home, FIRST)

    assert (told["tainted"], told["next_parent"]) == ([1, 2], None)
    assert champion(entries_of(home)) is None
    assert run(config, home, THIRD, stop_after="ingest")[0].parent is None


@pytest.mark.parametrize("gone", [False, True], ids=["old-files-there", "old-files-gone"])
def test_a_forgotten_user_is_still_held_by_versions_that_retracted_rows_trained(
    world: tuple[Path, Path, Path], home: Path, *, gone: bool
) -> None:
    """His rows of a retracted day are in no table any more, and yet the weights of its night were made of them."""
    config = world[0]
    retract(config, home, FIRST)
    if gone:
        newest = table_of(config, home).at()
        assert newest is not None
        newest.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    held = [one["what"] for one in forget(config, home)["still_held_by"]]

    assert [what.split(":")[0] for what in held if what.startswith("model")] == ["model version 1", "model version 2"]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"date": date(2024, 1, 1), "commit": None}, "nothing was ingested as the night of 2024-01-01"),
        ({"date": None, "commit": 9}, "nothing was ingested as commit 9"),
        ({"date": None, "commit": None}, "either"),
        ({"date": FIRST, "commit": 1}, "either"),
        ({"date": FIRST, "commit": None, "reason": " "}, "needs a reason"),
    ],
    ids=["date", "commit", "neither", "both", "reason"],
)
def test_a_wrong_retraction_changes_nothing(
    world: tuple[Path, Path, Path], home: Path, asked: dict[str, Any], match: str
) -> None:
    """One clear error, exit status 2, before any state changes."""
    config, before = world[0], snapshot(home)

    with pytest.raises(UsageError, match=match):
        erasing.retract(load_config(config), str(home), **{"reason": "r", **asked}, at_us=1)
    assert snapshot(home) == before


def test_nothing_is_retracted_twice(world: tuple[Path, Path, Path], home: Path) -> None:
    """The second time says so and changes nothing."""
    config = world[0]
    retract(config, home)
    count = len(entries_of(home))

    with pytest.raises(UsageError, match="nothing to retract: commit 2"):
        retract(config, home)
    assert len(entries_of(home)) == count


def test_neither_runs_beside_a_night(world: tuple[Path, Path, Path], home: Path) -> None:
    """While a night holds the home, both refuse before anything changes."""
    config = world[0]
    with night_lock(str(home), "2025-06-03"):
        before = snapshot(home)
        with pytest.raises(UsageError, match="2025-06-03 is running"):
            retract(config, home)
        with pytest.raises(UsageError, match="2025-06-03 is running"):
            forget(config, home)
        assert snapshot(home) == before


def test_a_retraction_killed_before_the_journal_is_finished_by_the_next(
    world: tuple[Path, Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have left the table: the second run takes up what the first one did, and tells the same."""
    config = world[0]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retract(config, home)

    told = retract(config, home)
    assert told == {"date": "2025-06-02", "reason": "bots", "rows": ROWS, "tainted": [2], "next_parent": 1}
    assert [e.kind for e in entries_of(home)].count("retracted") == 1
    assert table_of(config, home).erasures() == 1


def snapshot(home: Path) -> dict[str, bytes]:
    """Return every file of a home but its lock."""
    return {str(p): p.read_bytes() for p in home.rglob("*") if p.is_file() and p.name != "night.lock"}


def interrupt(*_args: object, **_more: object) -> None:
    """Stand in for a kill."""
    raise KeyboardInterrupt


def test_a_forgotten_user_is_in_no_file_of_the_home(world: tuple[Path, Path, Path], home: Path) -> None:
    """Not in table, sequences, packs, history, log or journal; what still holds him elsewhere is listed."""
    config = world[0]
    assert holders(home, HIM)

    told = forget(config, home)

    assert holders(home, HIM) == []
    assert told["user"] == HIM
    assert all(count > 0 for count in told["rows"].values())
    assert list(told["rows"]) == ["events", "sequences", "packs"]
    held = [one["what"] for one in told["still_held_by"]]
    assert held[0] == f"raw files below {config.parent / 'raw'}"
    assert [what.partition(":")[0] for what in held if what.startswith("model")] == [
        "model version 1",
        "model version 2",
    ]
    assert entries_of(home)[-1].payload == {"rows": told["rows"]}


def test_a_second_forget_finds_nothing_and_lists_the_same(world: tuple[Path, Path, Path], home: Path) -> None:
    """Who still holds him is known without his rows."""
    config = world[0]
    first = forget(config, home)
    count = len(entries_of(home))
    second = forget(config, home)

    assert second["rows"] == {"events": 0, "sequences": 0, "packs": 0}
    assert second["still_held_by"] == first["still_held_by"]
    assert len(entries_of(home)) == count


STEPS = ("erasure.forget_rows", "leftovers.clean", "nightfiles.forget", "_forget_history", "erasure.forget_files")


@pytest.mark.parametrize("step", [*STEPS, "Journal.append"])
def test_a_forgetting_killed_anywhere_is_finished_by_the_next(
    world: tuple[Path, Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """From the tombstone on no read shows him; the second run removes the rest."""
    config = world[0]
    with monkeypatch.context() as patch:
        patch.setattr(f"gr_core.stages.erasing.{step}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forget(config, home)
    table = table_of(config, home)
    assert HIM not in table.read(table.delta_version())["user_id"].to_list()

    forget(config, home)

    assert holders(home, HIM) == []


@pytest.mark.parametrize("later", [False, True], ids=["alone", "a later night came in"])
def test_a_night_that_was_under_way_goes_on_without_him(
    world: tuple[Path, Path, Path],
    home: Path,
    later: bool,  # noqa: FBT001
) -> None:
    """Its packs are those of a world where he was forgotten before; a finished night stays finished.

    It reads a version that also holds the rows of a later night then, and sees none of them.
    """
    config = world[0]
    early = home.parent / "early"
    shutil.copytree(home, early)
    forget(config, early)
    _, wanted = run(config, early, THIRD, stop_after="pack")
    assert wanted["ingest"]["rows"]["forgotten"] > 0

    run(config, home, THIRD, stop_after="pack")
    if later:
        write_day(config.parent / "raw", THIRD + timedelta(days=1))
        run(config, home, THIRD + timedelta(days=1), stop_after="sequences")
    forget(config, home)
    _, done = run(config, home, THIRD, stop_after="pack")

    digests = [{role: pack["digest"] for role, pack in one["pack"].items()} for one in (wanted, done)]
    assert digests[0] == digests[1]
    assert holders(home, HIM) == []
    assert outcome.finished(str(home), "2025-06-02") is not None


def test_a_user_forgotten_first_never_comes_in(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Case E11: the tombstone stands before the day is read; his rows are counted forgotten, and are nowhere."""
    config, home = world[0], tmp_path / "home"
    told = forget(config, home)
    assert told["rows"] == {"events": 0, "sequences": 0, "packs": 0}
    assert [one["what"] for one in told["still_held_by"] if one["what"].startswith("model")] == []

    _, done = run(config, home, FIRST, stop_after="pack")

    raw = pl.read_parquet(config.parent / "raw" / "log" / f"date={FIRST}" / "*.parquet")
    rows = done["ingest"]["rows"]
    assert rows["forgotten"] == raw.filter(pl.col("uid") == HIM).height > 0
    assert rows["read"] == rows["committed"] + rows["duplicates"] + rows["quarantined"] + rows["forgotten"]
    assert holders(home, HIM) == []


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture every line at every level."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


def test_no_line_names_the_user(world: tuple[Path, Path, Path], home: Path, said: pytest.LogCaptureFixture) -> None:
    """Neither a log line nor an error of forgetting has the id."""
    config = world[0]
    forget(config, home)
    with night_lock(str(home), "2025-06-03"), pytest.raises(UsageError) as caught:
        forget(config, home)

    assert said.records
    assert HIM not in said.text
    assert HIM not in str(caught.value)


def test_an_empty_id_is_refused(world: tuple[Path, Path, Path], home: Path) -> None:
    """It is nobody."""
    with pytest.raises(UsageError, match="got an empty one"):
        forget(world[0], home, " ")
