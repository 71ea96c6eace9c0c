"""Files of one day that differ: zones, units, types, keys and junk, as public troubles have them (cases C, D, E)."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from gr_core.data import contract
from gr_core.data.contract import contract_rows
from gr_core.errors import DataContractError
from tests.feeds import DAY, NOON, make_config, ms, read, rows, write


def test_naive_and_utc_files_of_one_day_give_right_instants(tmp_path: Path) -> None:
    """Case C5: New York wall time 23:30 is 03:30Z of the next day in summer and 04:30Z in winter; never 23:30Z."""
    for day, hour in ((date(2025, 6, 1), 3), (date(2025, 1, 15), 4)):
        wall = datetime(day.year, day.month, day.day, 23, 30)  # noqa: DTZ001 -- naive is the case
        expected = datetime(day.year, day.month, day.day, hour, 30, tzinfo=UTC) + timedelta(days=1)
        naive = rows({"id": "n"}).with_columns(pl.Series("ts", [wall], pl.Datetime("us")))
        aware = rows({"id": "z"}).with_columns(pl.Series("ts", [expected], pl.Datetime("us", "UTC")))
        shown = {"shown_at": {"column": "ts", "zone": "America/New_York"}}
        for place, order in enumerate(([naive, aware], [aware, naive])):
            write(tmp_path / str(place), *order, day=day)
            config = make_config(tmp_path / str(place), shown, lake={"zone": "America/New_York"})
            assert read(config, day).events["shown_at"].to_list() == [expected, expected]


def test_one_instant_in_every_unit_of_one_day(tmp_path: Path) -> None:
    """Case C12: timestamps of s, ms, us, ns and int96 in five files are one instant."""
    folder = tmp_path / f"dt={DAY}"
    folder.mkdir()
    for unit in ("s", "ms", "us", "ns", "int96"):
        kind = pa.timestamp("ns" if unit == "int96" else unit)
        table = rows({"id": unit}).to_arrow().drop_columns(["ts"])
        table = table.append_column("ts", pa.array([NOON.replace(tzinfo=None)], kind))
        pq.write_table(table, folder / f"{unit}.parquet", use_deprecated_int96_timestamps=unit == "int96")
    events = read(make_config(tmp_path, {"shown_at": {"column": "ts"}})).events

    assert events.height == 5
    assert events["shown_at"].unique().to_list() == [NOON]


def test_seconds_among_milliseconds_are_quarantined(tmp_path: Path) -> None:
    """Case C12: epoch seconds read as milliseconds are 1970, and milliseconds read as seconds lie beyond 2262."""
    write(tmp_path, rows({}), rows({"id": "f", "ts": ms(NOON) // 1000}))
    assert read(make_config(tmp_path)).reasons == {"bad_time": 1}
    config = make_config(tmp_path, {"shown_at": {"column": "ts", "unit": "s"}})
    assert read(config).reasons == {"bad_time": 1}


def test_an_ndjson_key_that_comes_late_is_counted(tmp_path: Path) -> None:
    """Case C6: 200 lines without it, then one with it: nothing is inferred from the first lines."""
    folder = tmp_path / f"dt={DAY}"
    folder.mkdir()
    line = {"id": "e", "uid": 1, "item": 7, "ts": ms(NOON), "clicked": 1, "liked": 0}
    lines = [json.dumps({**line, "id": f"e{n}", "text": 'a "quoted": word'}) for n in range(200)]
    lines.append(json.dumps({**line, "id": "late", "new": {"deep": [1, {"x": 2}]}, "liked": None}))
    (folder / "a.ndjson").write_text("\n".join(lines))
    (folder / "b.ndjson").write_text(json.dumps({**line, "id": "b"}))
    types = {"id": "string", **dict.fromkeys(("uid", "item", "ts", "clicked", "liked"), "int64")}
    batch = read(make_config(tmp_path, {"path": "dt={date}/*", "format": "ndjson", "types": types}))

    assert batch.events.height == 202
    assert batch.unknown_columns == {"new": 1, "text": 1}
    assert batch.figures["columns"]["new"] == "undeclared"


def test_an_unknown_column_changes_nothing_in_any_order(tmp_path: Path) -> None:
    """Case C2: a column that appears in the second file, or only in the first, is counted and not read."""
    without, extra = rows({}), rows({"id": "f"}).with_columns(y=pl.lit("new"))
    for place, order in enumerate(itertools.permutations([without, extra])):
        write(tmp_path / str(place), *order)
    one, two = (read(make_config(tmp_path / str(place))) for place in (0, 1))

    assert_frame_equal(one.events, two.events)
    assert one.unknown_columns == two.unknown_columns == {"y": 1}
    assert "y" not in one.events.columns


def test_a_csv_header_tells_unknown_columns_too(tmp_path: Path) -> None:
    """Declared columns are known although nothing reads them."""
    folder = tmp_path / f"dt={DAY}"
    folder.mkdir()
    rows({"spare": "s", "kept": 1}).write_csv(folder / "a.csv")
    types = {"ts": "int64", "clicked": "int32", "liked": "int32", "kept": "int32"}
    batch = read(make_config(tmp_path, {"path": "dt={date}/*", "format": "csv", "types": types}))

    assert batch.unknown_columns == {"spare": 1}


def test_item_0_is_an_item_like_any_other(tmp_path: Path) -> None:
    """Cases E16, D11: raw id 0 and a surface never seen before come as they are; no list of values is fixed."""
    write(tmp_path, rows({"item": 0, "surface": "tv"}, {"item": 1, "surface": "home"}))
    events = read(make_config(tmp_path, {"side": {"surface": "surface"}})).events

    assert sorted(events["item_id"]) == ["0", "1"]
    assert sorted(events["surface"]) == ["home", "tv"]


def test_many_small_files_meet_the_contract_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A17: the cost is a read a file; 120 files of a row are judged in one call, 121 with another type in three."""
    calls = []

    def counted(*arguments: Any) -> pl.DataFrame:
        calls.append(arguments[3].height)
        return contract_rows(*arguments)

    monkeypatch.setattr(contract, "contract_rows", counted)
    write(tmp_path, *(rows({"id": f"e{n}", "uid": None if n == 7 else n}, uid=pl.Int64) for n in range(120)))
    batch = read(make_config(tmp_path))
    assert calls == [120]
    assert (batch.read, batch.reasons, batch.figures["files"]) == (120, {"null_user": 1}, 120)
    assert batch.quarantine["file"][0].endswith("part-7.parquet")
    assert {Path(uri).stem.split("-")[1] for uri in batch.files} == {str(n) for n in range(120) if n != 7}

    calls.clear()
    write(tmp_path, *(rows({"id": f"e{n}", "uid": str(n) if n == 60 else n}) for n in range(121)))
    assert read(make_config(tmp_path)).events.height == 121
    assert len(calls) == 3
    assert sum(calls) == 121


def test_an_object_store_folder_of_junk_is_read_as_its_one_file(tmp_path: Path) -> None:
    """Case C15: marker, _SUCCESS and temporary file are passed over; a part without bytes stops the day by name."""
    write(tmp_path, rows({}))
    folder = tmp_path / f"dt={DAY}"
    (folder / "_SUCCESS").touch()
    (folder / ".tmp-x.parquet").write_bytes(b"PAR1")
    (folder / "sub.parquet").mkdir()
    config = make_config(tmp_path)
    assert read(config).events.height == 1

    (folder / "part-1.parquet").touch()
    with pytest.raises(DataContractError, match=r"part-1\.parquet: the file has no bytes"):
        read(config)
