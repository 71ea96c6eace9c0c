"""Raw files of every format and width read alike, and one bad value costs one row."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from gr_core.errors import DataContractError
from gr_core.lake import rawfile
from tests.feeds import DAY, NOON, make_config, ms, read, rows, write


def raw(root: Path, name: str) -> Path:
    """Return the path of a file of the day, its folder made."""
    path = root / f"dt={DAY}" / name
    path.parent.mkdir()
    return path


def test_text_files_lose_a_row_and_not_the_file(tmp_path: Path) -> None:
    """csv.gz and ndjson.gz by declared types: a bad value, a bad time and a line that is no record cost one row each."""
    types = {"id": "string", "uid": "int64", "item": "string", "ts": "int64", "clicked": "int32", "liked": "bool"}
    path = tmp_path / "dt=2025-06-01"
    path.mkdir()
    t = ms(NOON)
    (path / "a.csv.gz").write_bytes(
        gzip.compress(
            f"id,uid,item,ts,clicked,liked\na,9007199254740993,007,{t},1,true\nb,x,1,{t},1,\nc,1,1,junk,1,\n"
            f"d,,1,{t},1,\n".encode()
        )
    )
    lines = [
        f'{{"id": "a", "uid": 9007199254740993, "item": "007", "ts": {t}, "clicked": 1, "liked": true, "new": 1}}',
        f'{{"id": "b", "uid": "x", "item": "1", "ts": {t}}}',
        '{"id": "c", "uid": 1, "item": 1, "ts": "junk"}',
        f'{{"id": "d", "item": 1, "ts": {t}}}',
        "no record",
        "[1]",
    ]
    (path / "a.ndjson.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for form, more in (("csv", {}), ("ndjson", {"bad_row": 2})):
        feed = {"path": f"dt={{date}}/*.{form}.gz", "format": form, "types": types}
        batch = read(make_config(tmp_path, {**feed, "actions": {"click": "clicked = 1", "like": "liked"}}))
        assert batch.events.select("event_id", "user_id", "item_id", "actions").rows() == [
            ("a", "9007199254740993", "007", 0b11)
        ]
        assert batch.reasons == {"bad_value": 1, "bad_time": 1, "null_user": 1, **more}
    assert batch.quarantine.filter(pl.col("reason") == "bad_row")["row"].to_list() == ["[1]", "no record"]


def test_files_may_differ_in_width_order_and_spare_columns(tmp_path: Path) -> None:
    """Cases C2, C14: int32 beside int64, other column orders, categories and undeclared columns read alike."""
    small = rows({"item": 5}, uid=pl.Int32, item=pl.Int32, clicked=pl.Int8)
    wide = rows({"id": "f", "item": 1099511627776, "uid": 1}).with_columns(spare=pl.lit("x")).select(pl.all().reverse())
    texts = rows({"id": "g", "uid": "1", "item": "5"}, uid=pl.String, item=pl.String).cast({"uid": pl.Categorical})
    results = []
    for place, order in enumerate(itertools.permutations([small, wide, texts])):
        write(tmp_path / str(place), *order)
        results.append(read(make_config(tmp_path / str(place))).events)

    assert sorted(results[0]["item_id"]) == ["1099511627776", "5", "5"]
    assert results[0]["user_id"].to_list() == ["1"] * 3
    for other in results[1:]:
        assert_frame_equal(results[0], other)


def test_a_declared_column_may_be_absent_from_some_files(tmp_path: Path) -> None:
    """Case C2: with its type declared it is null where absent, in both file orders; absent everywhere is an error."""
    feed = {"types": {"liked": "int32"}}
    without, full = rows({}).drop("liked"), rows({"id": "f", "liked": 1})
    for place, order in enumerate([(without, full), (full, without)]):
        write(tmp_path / str(place), *order)
        events = read(make_config(tmp_path / str(place), feed)).events.sort("event_id")
        assert events["known"].to_list() == [0b01, 0b11]
    write(tmp_path / "none", without)
    with pytest.raises(DataContractError, match="column liked is missing"):
        read(make_config(tmp_path / "none", feed))


def test_an_all_null_column_is_read_as_declared(tmp_path: Path) -> None:
    """Case C6: a file whose column has no type, being all null, stands beside one with text."""
    feed = {"side": {"surface": "surface"}}
    write(tmp_path, rows({"surface": None}), rows({"id": "f", "surface": "tv"}))

    assert read(make_config(tmp_path, feed)).events.sort("event_id")["surface"].to_list() == [None, "tv"]


TYPES = {"id": "string", "uid": "int64", "item": "string", "ts": "int64", "clicked": "int32", "liked": "bool"}
TEXT = {"types": TYPES, "actions": {"click": "clicked = 1"}}


@pytest.mark.parametrize(
    "broken", ['"x": NaN', '"x": -Infinity', '"x": 1e400', '"clicked": [1]', '"x": "\\udc00"', '"x": "\xff"']
)
def test_one_broken_ndjson_line_costs_one_row(tmp_path: Path, broken: str) -> None:
    """A bare NaN, a number beyond float64, a list for text, half a letter and a byte that is no UTF-8: the line is quarantined, the rest is read."""
    path = raw(tmp_path, "a.ndjson")
    row = '{"id": "%s", "uid": 1, "item": "i", "ts": %d, %s}'
    lines = [row % (name, ms(NOON), more) for name, more in (("a", '"x": 1'), ("b", broken), ("c", '"x": "ok"'))]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    batch = read(make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "ndjson"}))

    assert sorted(batch.events["event_id"]) == ["a", "c"]
    assert batch.reasons == {"bad_row": 1}
    assert '"id": "b"' in batch.quarantine["row"][0]


@pytest.mark.parametrize("kind", ["string", "int64"])
def test_an_ndjson_id_that_is_a_float_is_never_another_id(tmp_path: Path, kind: str) -> None:
    """Case C7: beyond 2^53 a float is several integers: bad_value; below it, and where nobody reads it, it is one."""
    path = raw(tmp_path, "a.ndjson")
    line = '{"id": "%s", "uid": %s, "ts": %d, "clicked": 1, "größe": %s, "item": "i"}'
    users = ["9007199254740993", "9007199254740993.0", "1.2345678901234568e+18", "-1E16", "5.0", "9007199254740991.0"]
    sizes = ["1", "1", "1", "1", "2", "7e22"]
    lines = [line % (n, user, ms(NOON), size) for n, (user, size) in enumerate(zip(users, sizes, strict=True))]
    lines.append((line % ("deep", 3, ms(NOON), 1)).replace('"i"}', '"i", "more": {"uid": 1e20}}'))
    path.write_text("\n".join(lines), encoding="utf-8")
    types = {**TYPES, "uid": kind}
    feed = {**TEXT, "types": types, "path": "dt={date}/*", "format": "ndjson"}
    batch = read(make_config(tmp_path, feed))

    assert sorted(batch.events["user_id"]) == ["3", "5", "9007199254740991", "9007199254740993"]
    assert batch.reasons == {"bad_value": 3}

    named = {**feed, "types": {**types, "größe": kind}, "side": {"size": '"größe"'}}
    assert read(make_config(tmp_path, named)).reasons == {"bad_value": 4}


def test_one_broken_csv_record_costs_one_row(tmp_path: Path) -> None:
    """Too many fields, in columns that are read or not, and bytes that are no UTF-8: quarantined as they stand."""
    path = raw(tmp_path, "a.csv")
    t = ms(NOON)
    text = (
        f'id,uid,item,ts,clicked,spare\na,1,i,{t},1,"x\ny"\nb,1,i,{t},1,spare,\nc,1,\xff,{t},1,\n\n'
        f'd,1,i,{t},1,"two\nlines",more\ne,1,i,{t},1\n'
    )
    path.write_bytes(text.encode("latin-1"))
    batch = read(make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "csv"}))

    assert sorted(batch.events["event_id"]) == ["a", "e"]
    assert batch.reasons == {"bad_row": 3, "null_user": 1}
    assert batch.quarantine.filter(pl.col("reason") == "bad_row")["row"].to_list() == [
        f"b,1,i,{t},1,spare,",
        f"c,1,\\udcff,{t},1,",
        f'd,1,i,{t},1,"two\nlines",more',
    ]


def test_a_csv_whose_quotes_are_broken_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Where records cannot be told apart, nothing is guessed."""
    path = raw(tmp_path, "a.csv")
    path.write_text(f'id,uid,item,ts,clicked\na,1,"i,{ms(NOON)},1\nb,1,i,{ms(NOON)},1\n')

    with pytest.raises(DataContractError, match=r"a\.csv: cannot be read as csv.*deliver the file again"):
        read(make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "csv"}))


def test_a_csv_of_a_feed_without_a_format_says_which_key_to_set(tmp_path: Path) -> None:
    """Parquet is the default: a name that says otherwise is the likelier mistake than a broken file."""
    path = raw(tmp_path, "a.csv")
    path.write_text(f"id,uid,item,ts,clicked\na,1,i,{ms(NOON)},1\n")

    with pytest.raises(DataContractError, match=r'a\.csv: cannot be read as parquet.*set format = "csv"'):
        read(make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "parquet"}))


def test_a_missing_column_is_told_without_the_readers_own(tmp_path: Path) -> None:
    """The columns there are, are the file's."""
    path = raw(tmp_path, "a.csv")
    path.write_text(f"id,uid,ts,clicked\na,1,{ms(NOON)},1\n")

    with pytest.raises(DataContractError, match=r"the columns there are: \['clicked', 'id', 'ts', 'uid'\]"):
        read(make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "csv"}))


@pytest.mark.parametrize("form", ["parquet", "csv", "ndjson"])
def test_names_with_brackets_and_stars_are_files_as_any(tmp_path: Path, form: str) -> None:
    """Files and folders called [1], * and ? are each read as themselves, once."""
    folder = tmp_path / "raw[1] *" / "dt=2025-06-01"
    folder.mkdir(parents=True)
    for place, name in enumerate(["a1", "a[1]", "a*", "a?", "a]"]):
        frame = rows({"id": f"e{place}"})
        getattr(frame, f"write_{form}")(folder / f"{name}.{form}")
    types = {"id": "string", **dict.fromkeys(["uid", "item", "ts", "clicked", "liked"], "int64")}
    feed = {"path": f"dt={{date}}/*.{form}", "format": form, "types": types}
    batch = read(make_config(tmp_path / "raw[1] *", feed))

    assert sorted(batch.events["event_id"]) == ["e0", "e1", "e2", "e3", "e4"]


@pytest.mark.parametrize("form", ["csv", "ndjson"])
def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path, form: str) -> None:
    """Exports of some systems begin with one; the first row is as good as the others."""
    path = raw(tmp_path, f"a.{form}")
    frame = rows({}, {})
    getattr(frame, f"write_{form}")(path)
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    types = {"id": "string", **dict.fromkeys(["uid", "item", "ts", "clicked", "liked"], "int64")}
    batch = read(make_config(tmp_path, {"path": "dt={date}/*", "format": form, "types": types}))

    assert (batch.events.height, batch.read) == (2, 2)


def test_a_csv_column_that_stands_twice_is_refused_where_it_is_read(tmp_path: Path) -> None:
    """The first one is not taken in silence; columns that nobody reads may repeat."""
    path = raw(tmp_path, "a.csv")
    config = make_config(tmp_path, {**TEXT, "path": "dt={date}/*", "format": "csv"})
    path.write_text(f"id,uid,item,ts,clicked,liked,x,x\na,1,i,{ms(NOON)},1,0,3,4\n")
    assert read(config).events.height == 1

    path.write_text(f"id,uid,item,ts,clicked,liked,uid\na,1,i,{ms(NOON)},1,0,2\n")
    with pytest.raises(DataContractError, match=r"a\.csv: the header has uid twice"):
        read(config)


@pytest.mark.parametrize("form", ["parquet", "csv", "ndjson"])
def test_a_file_that_changed_under_its_reader_is_an_error_that_names_it(tmp_path: Path, form: rawfile.Format) -> None:
    """A broken row is looked up again for quarantine: by then its file may be shorter, another, or gone."""
    path = tmp_path / f"a.{form}"
    getattr(rows({}), f"write_{form}")(path)
    for change in (lambda: None, lambda: path.write_bytes(b"\x00"), path.unlink):
        change()
        with pytest.raises(DataContractError, match=f"a.{form}: the file changed while it was read"):
            rawfile.raw_rows(str(path), form, [5])
