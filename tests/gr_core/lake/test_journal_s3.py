"""The journal and the event table on S3: conditional puts make one of two writers lose, and nothing else gets lost."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, JournalMoved
from tests.s3 import bucket, conditional_puts, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

APPEND_3 = """
import sys
from gr_core.lake.journal import Journal
for n in range(3):
    Journal(sys.argv[1]).append("attempt", sys.argv[2], {"n": n}, at_us=n)
"""
INGEST = """
import sys
from datetime import date
from gr_core.config import load_config
from gr_core.data.contract import read_day
from gr_core.lake.events import EventTable
from gr_core.lake.source import list_files
config, day = load_config(sys.argv[1]), date.fromisoformat(sys.argv[3])
feed = config.source.feed("events")
batch = read_day(config, day, list_files(config, day, feed), feed=feed)
print(EventTable(sys.argv[2], config).ingest(sys.argv[3], batch, parent=None).number)
"""


def test_four_processes_append_at_once(bucket: str, root: Path) -> None:
    """Four processes append three entries each, the table's creation included: 12 entries, numbered 1 to 12."""
    uri = f"{bucket}/home/lake/journal"
    assert Journal(uri).entries() == []
    children = [subprocess.Popen([sys.executable, "-c", APPEND_3, uri, name], cwd=root) for name in "abcd"]

    assert [child.wait(timeout=120) for child in children] == [0] * 4
    entries = Journal(uri).entries()
    assert [entry.seq for entry in entries] == list(range(1, 13))
    for name in "abcd":
        assert [entry.payload["n"] for entry in entries if entry.night == name] == list(range(3))


def test_stale_knowledge_is_refused(bucket: str) -> None:
    """Compare-and-set holds on S3: an entry written on stale knowledge is refused, nothing is written."""
    journal = Journal(f"{bucket}/journal")
    journal.append("attempt", "a", {}, at_us=1, expect=0)

    with pytest.raises(JournalMoved, match="entry 1, expected 0"):
        journal.append("attempt", "b", {}, at_us=2, expect=0)
    assert [entry.night for entry in journal.entries()] == ["a"]


def test_a_commit_whose_answer_was_lost_is_not_repeated(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store took the entry, the answer got lost: the append is the entry that is there, not a second one."""
    journal = Journal(f"{bucket}/journal")
    real = Journal._commit

    def unanswered(self: Journal, *told: object) -> bool:
        real(self, *told)  # type: ignore[arg-type]  # passed on as it came
        return False

    monkeypatch.setattr(Journal, "_commit", unanswered)

    assert journal.append("attempt", "a", {"n": 1}, at_us=1).seq == 1
    assert [entry.seq for entry in journal.entries()] == [1]


def test_two_nights_ingested_at_once_are_both_there(bucket: str, tmp_path: Path, root: Path) -> None:
    """Two processes ingest two nights at once: two commits with numbers of their own, every row of both."""
    config, table = tiny.make(tmp_path, days=2), f"{bucket}/home/lake/events"
    days = [tiny.FIRST_DAY + timedelta(days=n) for n in range(2)]
    words = [[sys.executable, "-c", INGEST, str(config), table, str(day)] for day in days]
    children = [subprocess.Popen(word, cwd=root, stdout=subprocess.PIPE, text=True) for word in words]
    told = [child.communicate(timeout=120)[0].strip() for child in children]

    assert [child.returncode for child in children] == [0, 0]
    assert sorted(told) == ["1", "2"]
    events = EventTable(table, load_config(config))
    rows = events.read(events.delta_version())
    assert rows.height == 2 * tiny.ROWS_A_DAY
    assert rows["event_id"].n_unique() == rows.height
    for day, number in zip(days, told, strict=True):
        found = events.find(str(day))
        assert found is not None
        assert (found.number, found.rows.committed) == (int(number), tiny.ROWS_A_DAY)
        assert rows.filter(rows["commit"] == found.number).height == tiny.ROWS_A_DAY


def test_delta_writes_its_log_by_conditional_put(bucket: str, s3_endpoint: str) -> None:
    """The default of deltalake on S3: every file of the log is put with If-None-Match, data files are not."""
    journal = Journal(f"{bucket}/journal")
    for night in ("a", "b"):
        journal.append("attempt", night, {}, at_us=1)

    own = f"/{bucket.removeprefix('s3://')}/journal/"
    found = [path.removeprefix(own) for path in conditional_puts(s3_endpoint) if path.startswith(own)]
    assert found == [f"_delta_log/{version:020d}.json" for version in range(3)]
