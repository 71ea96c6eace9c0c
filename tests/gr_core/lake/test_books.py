"""The event table's books: rows committed, less rows removed, are the rows that its files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from gr_core.lake.events import books, erasure
from tests.events import batch, event, make_config, table


def test_the_balance_follows_every_kind_of_version(tmp_path: Path) -> None:
    """Inserts, repeats that update, an empty ingestion, a forgotten user and a compaction: the sum is right each time."""
    config = make_config()
    lake = table(tmp_path, config)
    assert lake.check_rows() == 0

    lake.ingest("a", batch(config, *(event(f"e{n}", f"u{n % 4}") for n in range(8)), bad=2), parent=None)
    assert lake.check_rows() == 8
    lake.ingest("b", batch(config, event("e0", "u0", actions=1), event("f", "u9")), parent=None)
    assert lake.check_rows() == 9
    lake.ingest("c", batch(config), parent=None)
    assert lake.check_rows() == 9
    assert erasure.forget_rows(lake.at, lake.uri, "u1", config.lake.num_buckets) == 2
    assert lake.check_rows() == 7
    lake.maintain()
    assert lake.check_rows() == 7
    assert lake.read(lake.delta_version()).height == 7


def test_rows_that_vanish_are_found(tmp_path: Path) -> None:
    """Whoever takes rows out without an entry in the books, the next night says how many there should be."""
    config = make_config()
    lake = table(tmp_path, config)
    lake.ingest("a", batch(config, *(event(f"e{n}", f"u{n}") for n in range(6))), parent=None)
    bucket = event("e0", "u0")["bucket"]
    lost = DeltaTable(lake.uri).delete(f"bucket = {bucket}")["num_deleted_rows"]

    assert lost > 0
    with pytest.raises(AssertionError, match=rf"commits brought 6 rows .* hold {6 - lost} "):
        lake.check_rows()
    with pytest.raises(AssertionError):
        books.check(DeltaTable(lake.uri))
