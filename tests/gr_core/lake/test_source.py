"""Listing the raw files of a day, and the check before any state changes."""

from __future__ import annotations

import gzip
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.config import Config, parse_config
from gr_core.errors import ConfigError, DataContractError
from gr_core.lake.source import input_identity, list_files, list_table, preflight

DAY = date(2025, 6, 1)
ROW = {"uid": 1, "item": 7, "ts": 1_748_779_200_000, "clicked": 1, "spare": "x", "extra": 3}


def make_config(root: Path, feed: dict[str, Any] | None = None, **source: Any) -> Config:
    feed = {
        "name": "log",
        "path": "dt={date}/*",
        "event_key": ["uid", "item", "ts"],
        "shown_at": {"column": "ts", "unit": "ms"},
        "columns": {"user_id": "uid", "item_id": "item"},
        "actions": {"click": "clicked = 1"},
        **(feed or {}),
    }
    feeds = [feed, *source.pop("more_feeds", [])]
    return parse_config(
        {"name": "t", "source": {"root": str(root), "actions": [{"name": "click"}], "feeds": feeds, **source}}
    )


def put(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame({**{k: [v] for k, v in ROW.items()}, **columns}).write_parquet(path)
    return path


def test_only_data_files_are_listed(tmp_path: Path) -> None:
    """Case C15: directories, markers and temporary files are passed over; names, sizes and versions are told."""
    config = make_config(tmp_path)
    file = put(tmp_path / "dt=2025-06-01" / "part-0.parquet")
    (file.parent / "_SUCCESS").touch()
    (file.parent / ".tmp-x.parquet").touch()
    (file.parent / "nested.parquet").mkdir()
    put(tmp_path / "dt=2025-06-02" / "part-0.parquet")

    (found,) = list_files(config, DAY, config.source.feeds[0])

    assert (found.feed, found.uri, found.size) == ("log", str(file), file.stat().st_size)
    assert found.etag == str(file.stat().st_mtime_ns)


def test_junk_in_a_temporary_directory_is_no_data(tmp_path: Path) -> None:
    """A file below a directory that the ignore globs name is not listed; the fixed part of a path is never junk."""
    config = make_config(tmp_path / "_in", {"path": "_raw/dt={date}/**/*.parquet"})
    put(tmp_path / "_in/_raw/dt=2025-06-01/_temporary/0/part.parquet")
    kept = put(tmp_path / "_in/_raw/dt=2025-06-01/h=0/part.parquet")

    assert [file.uri for file in list_files(config, DAY, config.source.feeds[0])] == [str(kept)]


def test_a_data_file_without_bytes_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Case C15: a part of no bytes is an upload that broke off, not an empty file."""
    config = make_config(tmp_path)
    put(tmp_path / "dt=2025-06-01" / "part-0.parquet")
    (tmp_path / "dt=2025-06-01" / "part-1.parquet").touch()

    with pytest.raises(DataContractError, match=r"part-1\.parquet: the file has no bytes"):
        list_files(config, DAY, config.source.feeds[0])


def test_a_path_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    """A name longer than any file's is told as what the config says, and no crash of the check."""
    config = make_config(tmp_path, {"path": "x" * 300})
    with pytest.raises(DataContractError, match="cannot be listed"):
        list_files(config, DAY, config.source.feeds[0])


def test_links_to_nothing_and_folders_named_as_files_are_no_data(tmp_path: Path) -> None:
    """A dangling link, a loop of links and a folder match the glob; none is a file, and the rest of the day is read."""
    folder = put(tmp_path / f"dt={DAY}" / "part-0.parquet").parent
    (folder / "gone.parquet").symlink_to(folder / "nowhere")
    (folder / "loop.parquet").symlink_to(folder / "loop.parquet")
    (folder / "folder.parquet").mkdir()
    config = make_config(tmp_path)

    assert [Path(file.uri).name for file in list_files(config, DAY, config.source.feeds[0])] == ["part-0.parquet"]


def test_a_new_or_changed_file_is_seen_at_once(tmp_path: Path) -> None:
    """Case C3: nothing is cached, and the identity changes with every file that comes, goes or changes."""
    config = make_config(tmp_path)
    feed = config.source.feeds[0]
    first = put(tmp_path / "dt=2025-06-01" / "b.parquet")
    one = input_identity(list_files(config, DAY, feed))
    put(tmp_path / "dt=2025-06-01" / "a.parquet")
    two = input_identity(list_files(config, DAY, feed))
    first.unlink()

    assert len(one) == 1
    assert len(two) == 2
    assert two == sorted(two)
    assert len(input_identity(list_files(config, DAY, feed))) == 1
    assert input_identity(list_files(config, DAY, feed)[::-1]) == input_identity(list_files(config, DAY, feed))


def test_a_missing_day_stops_or_warns_as_configured(tmp_path: Path) -> None:
    """missing_day = stop names the glob and the other setting; warn goes on without files."""
    assert list_files(make_config(tmp_path), DAY, make_config(tmp_path).source.feeds[0]) == []
    with pytest.raises(DataContractError, match=r"dt=2025-06-01/\*.*missing_day = \"warn\""):
        preflight(make_config(tmp_path), DAY, bootstrap=False)
    assert preflight(make_config(tmp_path, missing_day="warn"), DAY, bootstrap=False) == []


def test_a_missing_root_is_told_from_a_missing_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the root itself is not there: the root as configured, and where it was looked for."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataContractError) as got:
        preflight(make_config(Path("raw")), DAY, bootstrap=False)
    assert f"source.root raw does not exist (seen from {Path.cwd()})" in got.value.message

    (tmp_path / "raw").mkdir()
    with pytest.raises(DataContractError, match="day 2025-06-01 is missing") as got:
        preflight(make_config(Path("raw")), DAY, bootstrap=False)
    assert "source.root raw" not in got.value.message


@pytest.mark.parametrize(
    ("feed", "text", "hint"),
    [
        ({"format": "csv", "types": {"ts": "int64"}}, "cannot be applied", 'clicked = "int64"'),
        (
            {"format": "csv", "types": {"ts": "int64"}, "actions": {"click": "clicked"}},
            "expected a boolean",
            'clicked = "bool"',
        ),
        ({"format": "csv"}, "expected an integer", 'ts = "int64"'),
        ({"format": "ndjson", "types": dict.fromkeys(("uid", "item"), "int64")}, "is missing", 'ts = "string"'),
    ],
)
def test_a_text_file_without_a_declared_type_says_how_to_declare_it(
    tmp_path: Path, feed: dict[str, Any], text: str, hint: str
) -> None:
    """Undeclared, a csv column is text and an ndjson column is not read: the error shows the declaration to write."""
    path = tmp_path / "dt=2025-06-01" / "a"
    path.parent.mkdir()
    if feed["format"] == "csv":
        pl.DataFrame([ROW]).write_csv(path)
        rule = "a csv column is text unless source.feeds[log].types declares it"
    else:
        pl.DataFrame([ROW]).write_ndjson(path)
        rule = "an ndjson column is read only where source.feeds[log].types declares it"

    with pytest.raises(DataContractError, match=text) as got:
        preflight(make_config(tmp_path, feed), DAY, bootstrap=False)

    assert got.value.message.endswith(f"; {rule}, e.g. types = {{ {hint} }}")


def test_a_parquet_file_brings_its_types(tmp_path: Path) -> None:
    """Nothing is said of declarations where they would change nothing."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet", clicked=["1"])

    with pytest.raises(DataContractError, match=r"mend the file or the expression$"):
        preflight(make_config(tmp_path), DAY, bootstrap=False)


def test_a_file_without_rows_is_no_missing_day(tmp_path: Path) -> None:
    """A file with the columns and no row says that the day was empty."""
    path = put(tmp_path / "dt=2025-06-01" / "a.parquet")
    pl.read_parquet(path).head(0).write_parquet(path)

    assert len(preflight(make_config(tmp_path), DAY, bootstrap=False)) == 1


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A damaged parquet file and a broken gzip stream stop the night before it starts."""
    (tmp_path / "dt=2025-06-01").mkdir()
    bad = tmp_path / "dt=2025-06-01" / "a.parquet"
    bad.write_bytes(b"PAR1 this is no parquet")
    with pytest.raises(DataContractError, match=r"a\.parquet: cannot be read as parquet"):
        preflight(make_config(tmp_path), DAY, bootstrap=False)

    bad.rename(bad.with_name("a.csv.gz"))
    with pytest.raises(DataContractError, match=r"a\.csv\.gz: cannot be read as csv"):
        preflight(make_config(tmp_path, {"format": "csv"}), DAY, bootstrap=False)


@pytest.mark.parametrize(
    ("feed", "missing"),
    [
        ({}, "clicked"),
        ({}, "ts"),
        ({}, "uid"),
        ({"side": {"tag": "upper(spare)"}}, "spare"),
        ({"visibility_delay_seconds": "extra / 1000"}, "extra"),
        ({"event_key": ["spare"]}, "spare"),
        ({"action_times": {"click": {"column": "extra", "unit": "ms"}}}, "extra"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, feed: dict[str, Any], missing: str) -> None:
    """Whatever needs it: SQL, key or time; the file, the column, the key and the columns there are stand in the text."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet")
    path = put(tmp_path / "dt=2025-06-01" / "b.parquet")
    pl.read_parquet(path).drop(missing).write_parquet(path)

    with pytest.raises(
        DataContractError, match=rf"b\.parquet: column {missing} is missing, source\.feeds\[log\]"
    ) as got:
        preflight(make_config(tmp_path, feed), DAY, bootstrap=False)
    assert "'item'" in got.value.message


@pytest.mark.parametrize(
    ("column", "values", "feed", "text"),
    [
        ("ts", ["noon"], {}, r"column ts of .*shown_at has type String, expected an integer \(unit ms\)"),
        ("ts", [1.5], {}, r"column ts of .*shown_at has type Float64, expected an integer"),
        ("ts", [1], {"shown_at": {"column": "ts"}}, "has type Int64, expected a timestamp; for integers declare unit"),
        ("ts", [1], {"shown_at": {"column": "ts", "format": "%Y"}}, "has type Int64, expected text in the format %Y"),
        ("uid", [1.5], {}, r"columns\.user_id = 'uid' has type Float64 .*expected an integer or text"),
        ("clicked", ["1"], {}, "cannot be applied to clicked String"),
        ("clicked", [1], {"actions": {"click": "clicked"}}, r"has type Int64 .*expected a boolean"),
        ("spare", [[1]], {"side": {"tag": "spare"}}, r"has type List\(Int64\) .*expected a number, text or boolean"),
        ("spare", ["x"], {"visibility_delay_seconds": "spare"}, "expected a number of seconds"),
    ],
)
def test_a_mistyped_column_is_named_with_its_type(
    tmp_path: Path, column: str, values: list[Any], feed: dict[str, Any], text: str
) -> None:
    """File, column, its type and the expected one stand in the text."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet", **{column: values})

    with pytest.raises(DataContractError, match=rf"a\.parquet: .*{text}"):
        preflight(make_config(tmp_path, feed), DAY, bootstrap=False)


def test_bootstrap_files_are_checked_only_when_they_are_read(tmp_path: Path) -> None:
    """A missing history stops the first night, whatever missing_day says, and no other night."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet")
    history = (
        make_config(tmp_path)
        .source.feeds[0]
        .model_copy(update={"name": "history", "role": "bootstrap", "path": "history/*"})
    )
    config = make_config(tmp_path, more_feeds=[history], missing_day="warn")

    assert len(preflight(config, DAY, bootstrap=False)) == 1
    with pytest.raises(DataContractError, match="feed history: no file matches"):
        preflight(config, DAY, bootstrap=True)
    put(tmp_path / "history" / "h.parquet")
    assert [file.feed for file in preflight(config, DAY, bootstrap=True)] == ["log", "history"]


def test_side_tables_are_checked_and_listed(tmp_path: Path) -> None:
    """A side table must be there with its columns; its files belong to the day's input."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet")
    table = {"name": "items", "path": "items.parquet", "on": {"item_id": "vid"}, "side": {"tag": "lower(tag)"}}
    config = make_config(tmp_path, tables=[table])

    with pytest.raises(DataContractError, match=r"side table items: no file matches .*items\.parquet"):
        preflight(config, DAY, bootstrap=False)
    pl.DataFrame({"vid": [1]}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(DataContractError, match=r"items\.parquet: column tag is missing"):
        preflight(config, DAY, bootstrap=False)
    pl.DataFrame({"vid": [1], "tag": ["A"]}).write_parquet(tmp_path / "items.parquet")
    assert [file.feed for file in preflight(config, DAY, bootstrap=False)] == ["log", "table:items"]


def test_a_day_sees_the_newest_complete_snapshot(tmp_path: Path) -> None:
    """Snapshot S counts from S + snapshot_lag_days on; junk and other names are no snapshots."""
    table = {"name": "items", "path": "items/{date}.parquet", "on": {"item_id": "vid"}, "side": {"tag": "tag"}}
    config = make_config(tmp_path, tables=[table])
    for name in ("2025-05-28", "2025-05-30", "2025-06-01", "latest"):
        put(tmp_path / "items" / f"{name}.parquet")

    def seen(day: int) -> list[str]:
        return [Path(f.uri).stem for f in list_table(config, date(2025, 5, day), config.source.tables[0])]

    assert seen(28) == []
    assert seen(29) == ["2025-05-28"]
    assert seen(30) == ["2025-05-28"]
    assert seen(31) == ["2025-05-30"]


@pytest.mark.parametrize("sql", ["clicked +", "max(clicked) = 1", "rank() over (order by ts) = 1", "(select 1) = 1"])
def test_wrong_sql_names_its_key(tmp_path: Path, sql: str) -> None:
    """SQL that does not parse or looks at other rows is a config error, before any file is opened."""
    put(tmp_path / "dt=2025-06-01" / "a.parquet")

    with pytest.raises(ConfigError, match=r"source\.feeds\[log\]\.actions\.click: "):
        preflight(make_config(tmp_path, {"actions": {"click": sql}}), DAY, bootstrap=False)


def test_gzipped_text_feeds_pass_with_declared_types(tmp_path: Path) -> None:
    """csv.gz and ndjson.gz are checked against the declared types; an undeclared type is text."""
    (tmp_path / "dt=2025-06-01").mkdir()
    csv = tmp_path / "dt=2025-06-01" / "a.csv.gz"
    csv.write_bytes(gzip.compress(b"uid,item,ts,clicked\n1,7,1748779200000,1\n"))
    types = {"uid": "int64", "item": "int64", "ts": "int64", "clicked": "int32"}

    assert len(preflight(make_config(tmp_path, {"format": "csv", "types": types}), DAY, bootstrap=False)) == 1
    with pytest.raises(DataContractError, match=r"column ts of .* has type String"):
        preflight(make_config(tmp_path, {"format": "csv"}), DAY, bootstrap=False)
    with pytest.raises(ConfigError, match=r"source\.feeds\[log\]\.types\.uid must be one of"):
        preflight(make_config(tmp_path, {"format": "csv", "types": {"uid": "long"}}), DAY, bootstrap=False)
    with pytest.raises(DataContractError, match="cannot be read as ndjson"):
        preflight(make_config(tmp_path, {"format": "ndjson", "types": types}), DAY, bootstrap=False)
    csv.write_bytes(gzip.compress(b'{"uid":1,"item":7,"ts":1748779200000,"clicked":1}\n'))
    assert len(preflight(make_config(tmp_path, {"format": "ndjson", "types": types}), DAY, bootstrap=False)) == 1
