"""Format numbers: whatever is stored by another release is refused by name, with what to do, before it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.data import vocabulary
from gr_core.data.batches import read_index
from gr_core.errors import FormatError
from gr_core.formats import check_format
from gr_core.lake import folders, tombstones
from gr_core.lake.events import EventTable
from gr_core.night import open_night
from gr_core.stages import moving
from gr_core.train.state import read_state
from tests.erased import FIRST, SECOND, entries_of

World = tuple[Path, Path, Path]


def renumber(path: Path, number: Any) -> None:
    """Write another format number into a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))


def retable(path: Path, number: int) -> None:
    """Write another format number into a Delta table's description."""
    table = DeltaTable(str(path))
    told = json.loads(table.metadata().description or "{}")
    table.alter.set_table_description(json.dumps({**told, "format": number}))


def checkpoint(home: Path) -> Path:
    """Return the first night's checkpoint."""
    return next((home / "nights" / str(FIRST)).glob("checkpoint-*"))


STORED: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Path], Any], str]] = {
    "checkpoint": (
        lambda home: checkpoint(home) / "state.json",
        lambda _, path: read_state(path.parent),
        "full retrain",
    ),
    "vocabulary": (
        lambda home: next((home / "nights" / str(FIRST)).glob("vocabulary-*")) / "vocabulary.json",
        lambda _, path: vocabulary.load(path.parent),
        "full retrain",
    ),
    "pack": (
        lambda home: home / "nights" / str(FIRST) / "packs" / "train" / "index.json",
        lambda _, path: read_index(path.parent, verify=False),
        "pack again",
    ),
    "tombstone": (
        lambda home: next((home / "lake" / "tombstones").glob("*.json")),
        lambda home, _: tombstones.trained(str(home / "lake")),
        "the release that wrote it",
    ),
}


@pytest.mark.parametrize("number", [0, 99, None], ids=["older", "newer", "none"])
@pytest.mark.parametrize("what", STORED)
def test_a_file_of_another_format_is_refused_by_name(poisoned_home: Path, what: str, number: int | None) -> None:
    """The error has the file, its format, ours and the remedy; a newer file asks for a newer release."""
    tombstones.add(str(poisoned_home / "lake"), "somebody", 2, at_us=1, versions=[])
    find, read, remedy = STORED[what]
    path = find(poisoned_home)
    renumber(path, number)

    advice = "a newer release wrote it" if number == 99 else remedy
    with pytest.raises(FormatError, match=rf"{what} format {number}, this release reads \d+; .*{advice}"):
        read(poisoned_home, path)


@pytest.mark.parametrize("what", ["journal", "event table"])
def test_a_table_of_another_format_is_refused_by_name(poisoned: World, poisoned_home: Path, what: str) -> None:
    """Journal and event table say their format in the table's description."""
    path = poisoned_home / "lake" / ("journal" if what == "journal" else "events")
    retable(path, 7)

    with pytest.raises(FormatError, match=rf"{what} format 7, this release reads \d; a newer release wrote it"):
        _ = (
            entries_of(poisoned_home)
            if what == "journal"
            else EventTable(str(path), load_config(poisoned[0])).delta_version()
        )


def test_a_journal_of_the_first_releases_says_no_format_and_is_read(poisoned_home: Path) -> None:
    """No description at all is format 1."""
    DeltaTable(str(poisoned_home / "lake" / "journal")).alter.set_table_description("")

    assert [entry.kind for entry in entries_of(poisoned_home)].count("finished") == 2


def test_a_night_whose_parent_is_of_another_format_is_refused_before_it_opens(
    poisoned: World, poisoned_home: Path, no_mlflow: None
) -> None:
    """The remedy stands in the message, and the journal is as it was: nothing was opened."""
    second = next((poisoned_home / "nights" / str(SECOND)).glob("checkpoint-*"))
    renumber(second / "state.json", 0)
    count = len(entries_of(poisoned_home))

    with pytest.raises(FormatError, match="checkpoint format 0, this release reads 1; start a new lineage"):
        open_night(load_config(poisoned[0]), str(poisoned_home), tiny.FIRST_DAY.replace(day=3), at_us=9)

    assert len(entries_of(poisoned_home)) == count
    told = moving.rollback(load_config(poisoned[0]), str(poisoned_home), reason="old format", at_us=9)
    assert told["champion"] == 1, "an operator can still go back to a version that is readable"


def test_a_folder_on_an_object_store_says_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of a folder's files has a number of its own."""
    with pytest.raises(FormatError, match="folder format 9, this release reads 1; a newer release wrote it"):
        folders._files("s3://b/x", b'{"format": 9, "files": {}}')


def test_no_number_is_no_format() -> None:
    """True is not 1."""
    check_format("file", "x", 1, 1, "make it again")
    with pytest.raises(FormatError, match="x has file format True, this release reads 1; make it again"):
        check_format("file", "x", True, 1, "make it again")
