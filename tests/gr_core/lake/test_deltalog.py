"""A damaged Delta log or data file, of the journal or of the event table: one error that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from gr_core.errors import FormatError
from gr_core.lake import deltalog
from gr_core.lake.journal import Journal
from tests.events import batch, event, make_config, table

CONFIG = make_config()
NAMED = "{:020d}.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home whose journal and event table have three commits each."""
    home = tmp_path_factory.mktemp("whole")
    for n in (1, 2, 3):
        Journal(str(home / "lake" / "journal")).append("failed", "2025-06-01", {"stage": "train"}, at_us=n)
        table(home, CONFIG).ingest(f"n{n}", batch(CONFIG, event(f"e{n}")), parent=None)
    return home


@pytest.fixture
def home(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that may be damaged."""
    return shutil.copytree(whole, tmp_path / "home")


def cut(path: Path) -> None:
    """Keep the first hundred bytes."""
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    """Keep the name alone, as a crash of the machine does."""
    path.write_bytes(b"")


def nullify(path: Path) -> None:
    """Put JSON in its place that is no action."""
    path.write_text("null\n")


def fill(path: Path) -> None:
    """Put other bytes in its place."""
    path.write_bytes(b"\x00\xff no JSON")


@pytest.mark.parametrize("place", ["journal", "events"])
@pytest.mark.parametrize(
    ("version", "harm", "told"),
    [
        (0, cut, "it is damaged in line 1"),
        (2, cut, "it is damaged in line 1"),
        (2, fill, "it is damaged in line 1"),
        (3, cut, "it is damaged in line 1"),
        (2, nullify, "it is damaged in line 1"),
        (2, empty, "it is empty"),
        (3, empty, "it is empty"),
        (0, Path.unlink, "it is missing"),
        (2, Path.unlink, "it is missing"),
    ],
)
def test_a_damaged_log_file_is_named(
    home: Path, place: str, version: int, harm: Callable[[Path], None], told: str
) -> None:
    """Whatever befell it, and nothing of the library's own words is all that there is to read."""
    log = home / "lake" / place / "_delta_log"
    harm(log / NAMED.format(version))
    read = Journal(str(log.parent)).entries if place == "journal" else table(home, CONFIG).commits

    with pytest.raises(FormatError) as refused:
        read()

    assert refused.value.where == str(log / NAMED.format(version))
    assert f"{refused.value.where}: {told}" in str(refused.value)
    assert "restore this file from a backup" in str(refused.value)
    assert "<unknown>" not in str(refused.value)


@pytest.mark.parametrize("place", ["journal", "events"])
def test_a_log_that_is_gone_is_no_new_table(home: Path, place: str) -> None:
    """Data files without a log were a table once; taken for none, the first night would begin again."""
    shutil.rmtree(home / "lake" / place / "_delta_log")

    with pytest.raises(FormatError, match="_delta_log: it is missing, and data files lie beside it"):
        _ = Journal(str(home / "lake" / place)).entries() if place == "journal" else table(home, CONFIG).commits()


def test_an_entry_that_fell_out_of_the_journal_is_missed(home: Path) -> None:
    """A log file that is JSON but says nothing loses a decision, which the numbers of the others tell."""
    (home / "lake" / "journal" / "_delta_log" / NAMED.format(2)).write_text('{"other": 1}\n')

    with pytest.raises(FormatError, match=r"has lost its entries \[2\] of 3.*restore _delta_log from a backup"):
        Journal(str(home / "lake" / "journal")).entries()


@pytest.mark.parametrize(("text", "told"), [("", "it is empty"), ("{}\n", "it tells nothing of its commit")])
def test_a_commit_that_fell_out_of_the_event_table_is_named(home: Path, text: str, told: str) -> None:
    """Delta passes over a log file that says nothing; the books miss its rows, and the file is what to restore."""
    victim = home / "lake" / "events" / "_delta_log" / NAMED.format(2)
    victim.write_text(text)

    with pytest.raises(FormatError, match=told) as refused:
        table(home, CONFIG).check_rows()
    assert refused.value.where == str(victim)


@pytest.mark.parametrize("harm", [cut, Path.unlink])
@pytest.mark.parametrize("place", ["journal", "events"])
def test_a_damaged_data_file_is_named(home: Path, place: str, harm: Callable[[Path], None]) -> None:
    """The rows of the file that is not whole are neither left out nor a fault of Polars or Arrow."""
    victim = sorted((home / "lake" / place).rglob("*.parquet"))[1]
    harm(victim)
    events = table(home, CONFIG)

    with pytest.raises(FormatError, match=r"it is (damaged|missing)") as refused:
        _ = Journal(str(home / "lake" / place)).entries() if place == "journal" else events.read(events.delta_version())

    assert refused.value.where == str(victim)


def test_a_damaged_checkpoint_of_the_log_is_named(home: Path) -> None:
    """Delta's own checkpoints count as the log's files."""
    journal = home / "lake" / "journal"
    for n in range(4, 26):
        Journal(str(journal)).append("failed", "2025-06-01", {"stage": "train"}, at_us=n)
    checkpoint = next((journal / "_delta_log").glob("*.checkpoint.parquet"))
    cut(checkpoint)

    with pytest.raises(FormatError) as refused:
        Journal(str(journal)).entries()

    assert refused.value.where == str(checkpoint)


def test_what_the_log_does_not_show_is_told_in_one_line(home: Path) -> None:
    """Where every file of the log is whole the library's first line stands, without its stack."""
    told = deltalog.unreadable(
        str(home / "lake" / "journal"), "journal", ValueError("odd\n 0: <unknown>"), untouched="all else is well"
    )

    assert str(told).startswith(
        f"the journal cannot be read, {home}/lake/journal/_delta_log: the log cannot be read: odd;"
    )


def test_the_command_ends_with_exit_2(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, one message, and nothing was mended or made anew."""
    victim = home / "lake" / "journal" / "_delta_log" / NAMED.format(2)
    cut(victim)

    status = cli.main(["status", "--config", "conf/world.toml", "--home", str(home), "--json"])
    told = json.loads(capsys.readouterr().out)["error"]

    assert (status, told["type"], told["where"]) == (cli.BAD_INPUT, "FormatError", str(victim))


@pytest.mark.parametrize(("harm", "told"), [(cut, "is damaged: "), (Path.unlink, "is missing; restore")])
def test_a_damaged_file_of_quarantined_rows_is_named(tmp_path: Path, harm: Callable[[Path], None], told: str) -> None:
    """So is one of waiting actions, which is read alike."""
    events = table(tmp_path, CONFIG)
    events.ingest("n1", batch(CONFIG, event("a"), bad=2), parent=None)
    victim = next((tmp_path / "lake" / "quarantine").rglob("*.parquet"))
    harm(victim)

    with pytest.raises(FormatError, match="the quarantined rows of a commit, " + told) as refused:
        events.quarantine(1)
    assert refused.value.where == str(victim)
