import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gr_core.errors import UsageError
from gr_core.lake import journal as journal_module
from gr_core.lake.journal import Entry, Journal, JournalMoved

APPEND_20 = """
import sys
from gr_core.lake.journal import Journal
for n in range(20):
    Journal(sys.argv[1]).append("attempt", sys.argv[2], {"n": n}, at_us=n)
"""


def test_reading_where_nothing_is_writes_nothing(tmp_path: Path):
    """A journal that does not exist has no entries, and looking creates nothing."""
    home = tmp_path / "lake" / "journal"

    assert Journal(str(home)).entries() == []
    assert not home.exists()
    assert not home.parent.exists()


def test_entries_come_back_in_order_with_their_payload(tmp_path: Path):
    """Entries are numbered from 1 and keep kind, night, time and payload; numpy unwrapped, NaN as null."""
    journal = Journal(str(tmp_path / "journal"))
    first = journal.append("opened", "2025-06-01", {"seed": np.int64(3), "parent": None}, at_us=10)
    journal.append("failed", "2025-06-01", {"stage": "train", "ne": float("nan"), "names": ("a", "b")}, at_us=20)

    assert Entry(seq=1, at_us=10, kind="opened", night="2025-06-01", payload={"seed": 3, "parent": None}) == first
    assert [
        first,
        Entry(
            seq=2,
            at_us=20,
            kind="failed",
            night="2025-06-01",
            payload={"stage": "train", "ne": None, "names": ["a", "b"]},
        ),
    ] == journal.entries()


def test_an_entry_written_on_stale_knowledge_is_refused(tmp_path: Path):
    """Compare-and-set: with `expect` behind the newest entry, JournalMoved is raised and nothing is written."""
    journal = Journal(str(tmp_path / "journal"))
    journal.append("attempt", "2025-06-01", {}, at_us=1, expect=0)

    with pytest.raises(JournalMoved, match="entry 1, expected 0"):
        journal.append("attempt", "2025-06-02", {}, at_us=2, expect=0)
    assert [entry.night for entry in journal.entries()] == ["2025-06-01"]
    assert journal.append("attempt", "2025-06-02", {}, at_us=2, expect=1).seq == 2


def test_unknown_kinds_are_refused(tmp_path: Path):
    """A misspelt kind or an empty night never reaches the table."""
    with pytest.raises(UsageError, match="oppened"):
        Journal(str(tmp_path / "journal")).append("oppened", "2025-06-01", {}, at_us=0)
    with pytest.raises(UsageError, match="night"):
        Journal(str(tmp_path / "journal")).append("opened", "", {}, at_us=0)


def test_two_processes_at_once_lose_and_repeat_nothing(tmp_path: Path, root: Path):
    """Two processes append 20 entries each, the table's creation included: 40 entries, numbered 1 to 40."""
    uri = str(tmp_path / "journal")
    children = [subprocess.Popen([sys.executable, "-c", APPEND_20, uri, name], cwd=root) for name in ("a", "b")]

    assert [child.wait(timeout=120) for child in children] == [0, 0]
    entries = Journal(uri).entries()
    assert list(range(1, 41)) == [entry.seq for entry in entries]
    for name in ("a", "b"):
        assert list(range(20)) == [entry.payload["n"] for entry in entries if entry.night == name]


def test_merging_files_keeps_entries_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Small files are merged now and then; entries, order and the next number do not change."""
    monkeypatch.setattr(journal_module, "_MAX_FILES", 4)
    journal = Journal(str(tmp_path / "journal"))
    for n in range(10):
        journal.append("attempt", "2025-06-01", {"n": n}, at_us=n)

    assert list(range(10)) == [entry.payload["n"] for entry in journal.entries()]
    assert list(range(1, 11)) == [entry.seq for entry in journal.entries()]


def test_five_hundred_entries_lie_in_few_files(tmp_path: Path):
    """However many entries there are, they are read from fewer files than a merge waits for."""
    journal = Journal(str(tmp_path / "journal"))
    journal.append("attempt", "n", {}, at_us=0)
    table = journal_module.DeltaTable(journal.uri)
    text = json.dumps({"reasons": ["gate passed"] * 40})
    rows = [{"seq": n, "at_us": n, "kind": "attempt", "night": "n", "payload": text} for n in range(2, 481)]
    journal_module.write_deltalake(
        table,
        journal_module.pa.Table.from_pylist(rows, schema=journal_module.SCHEMA),
        mode="append",
        commit_properties=journal_module.CommitProperties(
            app_transactions=[journal_module.Transaction(journal_module.APP, 480)]
        ),
    )
    for n in range(20):
        assert 481 + n == journal.append("attempt", "n", {}, at_us=n).seq

    assert len(journal.entries()) == 500
    assert len(journal_module.DeltaTable(journal.uri).file_uris()) <= 48


def test_importing_the_journal_pulls_no_heavy_library(root: Path):
    """Prefect, MLflow and torch stay out: `status` must answer at once."""
    code = "import sys, gr_core.lake.journal; print([m for m in ('prefect', 'mlflow', 'torch') if m in sys.modules])"

    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize("name", ["a b", "é漢", "50%", "a*b", "a:b"])
@pytest.mark.parametrize("form", [str, Path.as_uri])
def test_homes_of_any_name(tmp_path: Path, name: str, form: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch):
    """Spaces, other alphabets, % * and : in a home's path: entries are written there, merged and read back."""
    monkeypatch.setattr(journal_module, "_MAX_FILES", 2)
    journal = Journal(form(tmp_path / name / "journal"))
    for n in range(3):
        journal.append("attempt", "2025-06-01", {"n": n}, at_us=n)

    assert [entry.payload["n"] for entry in journal.entries()] == [0, 1, 2]
    assert [name] == [path.name for path in tmp_path.iterdir()]


def test_a_home_that_delta_cannot_have_is_refused(tmp_path: Path):
    """A literal %20 would be read as a space in another folder: refused by name before anything is written."""
    with pytest.raises(UsageError, match="may not contain '%20'"):
        Journal(str(tmp_path / "a%20b" / "journal"))
    assert not list(tmp_path.iterdir())
