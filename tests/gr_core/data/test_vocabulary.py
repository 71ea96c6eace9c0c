"""Vocabulary: exact ids, rows that never move, fallbacks, and the stable hashes beside it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from gr_core.config import VocabularyTable as Rule
from gr_core.data.vocabulary import (
    COUNTS,
    Vocabulary,
    capacity_for,
    dictionary,
    grow,
    load,
    merge_counts,
    rows_of,
    save,
)
from gr_core.environment import child_variables
from gr_core.errors import FormatError
from gr_core.hashing import bucket_of, is_holdout, stable_hash
from tests.sequences import count_ids


def counts(pairs: dict[str, int], kinds: dict[str, str] | None = None) -> pl.DataFrame:
    return pl.DataFrame([(id_, (kinds or {}).get(id_), n) for id_, n in pairs.items()], schema=COUNTS, orient="row")


def rows(vocabulary: Vocabulary, table: str = "item_id") -> dict[str, int]:
    return dict(vocabulary.tables[table].ids.select("id", "row").iter_rows())


def encode(items: list[str | None], vocabulary: Vocabulary, kinds: list[str | None] | None = None) -> list[int]:
    """Return the embedding rows of items, by way of their dictionary."""
    frame = pl.DataFrame(
        {"item_id": items, "kind": kinds or [None] * len(items)}, schema_overrides={"item_id": pl.String}
    )
    codes, ids = dictionary(frame, "item_id", "kind" if kinds else None)
    return [int(row) for row in rows_of(ids, vocabulary.tables["item_id"])[codes]]


def test_example_8_stable_hashes() -> None:
    """Case D3: bucket and holdout of five ids, to the last digit, integers as their decimal text."""
    table = [
        ("0", 10713941634077555750, 6, 38, 0.793333),
        ("1", 11752012975267695695, 7, 15, 0.681855),
        ("42", 7584615153735279123, 3, 19, 0.854696),
        ("9007199254740993", 9625059563194058574, 6, 14, 0.365822),
        ("u7", 4912496727077890061, 5, 13, 0.809190),
    ]
    for id_, value, of_8, of_64, holdout in table:
        assert stable_hash(id_, "bucket") == value
        assert (bucket_of(id_, 8), bucket_of(id_, 64)) == (of_8, of_64)
        assert round(stable_hash(id_, "holdout") / 2**64, 6) == holdout
        assert is_holdout(id_, holdout + 1e-6)
        assert not is_holdout(id_, holdout - 1e-6)
    assert stable_hash(9007199254740993, "bucket") == 9625059563194058574
    assert bucket_of(7, 64) == bucket_of("7", 64)


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_buckets_are_the_same_in_a_process_of_its_own(seed: str) -> None:
    """Case D3: a new process, another PYTHONHASHSEED, ids that went through a Categorical."""
    told = subprocess.run(
        [sys.executable, "-c", BUCKETS],
        env={**child_variables(), "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(told.stdout) == [6, 7, 3, 6, 5]


BUCKETS = """
import json, polars as pl
from gr_core.hashing import buckets_of
ids = pl.Series(["0", "1", "42", "9007199254740993", "u7"]).cast(pl.Categorical)
print(json.dumps(buckets_of(ids, 8)))
"""


def test_rows_follow_reserved_ones_by_count_then_id() -> None:
    """0 pad, 1 unknown, 2 fallback, then ids from 3 on; below min_count an id is a candidate."""
    grown = grow(None, {"item_id": counts({"b": 5, "a": 5, "c": 9, "rare": 1})}, {"item_id": Rule(min_count=2)})

    assert rows(grown) == {"c": 3, "a": 4, "b": 5, "rare": -1}
    assert grown.tables["item_id"].rows == 6
    assert grown.tables["item_id"].fallbacks == 1


def test_item_zero_is_a_real_row() -> None:
    """The raw id 0 has its own row; only the padding is row 0 (case E16)."""
    grown = grow(None, {"item_id": counts({"0": 3, "1": 2})}, {"item_id": Rule()})
    encoded = encode(["0", "1", None], grown)

    assert encoded == [3, 4, 1]
    back = {row: id_ for id_, row in rows(grown).items()}
    assert [back[row] for row in encoded[:2]] == ["0", "1"]


def test_existing_rows_never_move() -> None:
    """Day 2 brings other ids, in another order: every old id keeps its row, new ones are appended (case D5)."""
    rules = {"item_id": Rule(min_count=2)}
    first = grow(None, {"item_id": counts({"x": 2, "y": 3, "z": 1})}, rules)
    second = grow(first, {"item_id": counts({"new": 50, "z": 1, "x": 1, "w": 1})}, rules)

    assert rows(first) == {"y": 3, "x": 4, "z": -1}
    assert rows(second) == {"y": 3, "x": 4, "new": 5, "z": 6, "w": -1}
    assert dict(second.tables["item_id"].ids.select("id", "count").iter_rows()) == {
        "y": 3,
        "x": 3,
        "new": 50,
        "z": 2,
        "w": 1,
    }


def test_growth_does_not_depend_on_order() -> None:
    """Rows in any order, buckets in any order: one version, equal rows."""
    rules = {"item_id": Rule(min_count=2, fallback_by="kind")}
    events = pl.DataFrame(
        {
            "item_id": [f"i{n * n % 37}" for n in range(300)],
            "kind": [None if n % 7 == 0 else f"k{n * n % 37 % 3}" for n in range(300)],
        }
    )
    whole = grow(None, count_ids(events, ["item_id"], rules), rules)

    for seed in range(3):
        mixed = events.sample(fraction=1, shuffle=True, seed=seed)
        parts = [count_ids(mixed.slice(start, 60), ["item_id"], rules)["item_id"] for start in range(0, 300, 60)]
        again = grow(None, {"item_id": merge_counts(parts[::-1]).sample(fraction=1, shuffle=True, seed=seed)}, rules)
        assert again.version == whole.version
        assert_frame_equal(again.tables["item_id"].ids, whole.tables["item_id"].ids)


def test_counting_leaves_nulls_out() -> None:
    """A null side feature is no id; an id is counted per event."""
    events = pl.DataFrame({"item_id": ["a", "a", "b"], "tag": [None, "t", None]})
    counted = count_ids(events, ["item_id", "tag"], {})

    assert counted["item_id"].rows() == [("a", None, 2), ("b", None, 1)]
    assert counted["tag"].rows() == [("t", None, 1)]
    assert count_ids(events.clear(), ["tag"], {})["tag"].schema == COUNTS


def test_fallback_rows_by_type() -> None:
    """Four types: rows 2 to 5, first real row 6 (example 2); types are fixed at the root of the lineage."""
    rules = {"item_id": Rule(min_count=2, fallback_by="kind")}
    kinds = {"a": "t1", "b": "t2", "c": "t3", "d": "t4", "lone": "t3"}
    root = grow(None, {"item_id": counts({"a": 4, "b": 3, "c": 2, "d": 2, "lone": 1}, kinds)}, rules)
    later = {"e": 2, "odd": 1, "lone2": 1}
    child = grow(root, {"item_id": counts(later, {"e": "t9", "odd": "t9", "lone2": "t2"})}, rules)

    assert root.tables["item_id"].fallback_types == child.tables["item_id"].fallback_types == ("t1", "t2", "t3", "t4")
    assert rows(root) == {"a": 6, "b": 7, "c": 8, "d": 9, "lone": -1}
    assert rows(child)["e"] == 10
    items = ["a", "lone", "lone2", "odd", "never", "never", None]
    assert encode(items, child, ["t1", "t3", "t2", "t9", "t4", None, "t4"]) == [6, 4, 3, 2, 5, 2, 1]
    assert encode(items, child) == [6, 4, 3, 2, 2, 2, 1]


def test_the_childs_fallback_is_what_the_parent_used() -> None:
    """A row that the parent does not know maps to the row the parent itself would have taken."""
    rules = {"item_id": Rule(min_count=2, fallback_by="kind")}
    parent = grow(None, {"item_id": counts({"a": 2, "b": 2, "c": 1}, {"a": "t1", "b": "t2", "c": "t2"})}, rules)
    child = grow(parent, {"item_id": counts({"c": 4, "n": 3}, {"c": "t1", "n": "t2"})}, rules)
    items, kinds = ["a", "b", "c", "n", "never"], ["t1", "t2", "t2", "t2", "t2"]

    table = child.tables["item_id"]
    fallback = dict(table.ids.select("row", "fallback").iter_rows())
    known_rows = parent.tables["item_id"].rows
    mapped = [fallback[row] if row >= known_rows else row for row in encode(items, child, kinds)]
    assert mapped == encode(items, parent, kinds)


def test_a_table_without_any_id_has_one_fallback() -> None:
    """Nothing counted: reserved rows only, every id falls back, null is unknown."""
    empty = grow(None, {"item_id": counts({})}, {"item_id": Rule(fallback_by="kind")})

    assert (empty.tables["item_id"].rows, empty.tables["item_id"].capacity) == (3, 4)
    assert encode(["a", None], empty) == [2, 1]


def test_a_dictionary_numbers_ids_by_first_appearance() -> None:
    """Code 1 for null, ids from 2 on; an id of two types has two codes; code 0 and 1 have the pad and unknown rows."""
    frame = pl.DataFrame({"item_id": ["b", None, "a", "b", "b"], "kind": ["x", "x", None, "y", "x"]})
    plain, ids = dictionary(frame, "item_id")
    typed, pairs = dictionary(frame, "item_id", "kind")

    assert plain.tolist() == [2, 1, 3, 2, 2]
    assert ids.rows() == [("b", None), ("a", None)]
    assert typed.tolist() == [2, 1, 3, 4, 2]
    assert pairs.rows() == [("b", "x"), ("a", None), ("b", "y")]
    grown = grow(None, {"item_id": counts({"b": 1})}, {"item_id": Rule()})
    assert rows_of(pairs, grown.tables["item_id"]).tolist() == [0, 1, 3, 2, 3]
    assert dictionary(frame.clear(), "item_id", "kind")[0].tolist() == []


@pytest.mark.parametrize(("num_rows", "capacity"), [(3, 4), (4, 8), (11, 16), (12, 16), (13, 32), (52, 128)])
def test_capacity_is_doubled_ahead_of_need(num_rows: int, capacity: int) -> None:
    """A power of two with at least a fifth free (example 9: 11 rows in 16)."""
    assert capacity_for(num_rows) == capacity


def test_capacity_never_shrinks() -> None:
    """The child's capacity is at least the parent's."""
    rules = {"item_id": Rule()}
    parent = grow(None, {"item_id": counts({f"i{n}": 1 for n in range(40)})}, rules)
    parent = Vocabulary(version="v", tables={"item_id": replace(parent.tables["item_id"], capacity=256)})

    assert grow(parent, {"item_id": counts({"x": 1})}, rules).tables["item_id"].capacity == 256


def test_round_trip(tmp_path: Path) -> None:
    """Saved and loaded it is equal; the files are plain JSON and an Arrow file pyarrow reads."""
    rules = {"item_id": Rule(min_count=2, fallback_by="kind"), "surface": Rule()}
    grown = grow(
        None,
        {"item_id": counts({"é": 2, "b": 1}, {"é": "t1", "b": "t2"}), "surface": counts({"home": 1})},
        rules,
    )
    save(grown, tmp_path)
    loaded = load(tmp_path)

    assert loaded.version == grown.version
    assert rows(loaded) == rows(grown)
    assert grow(loaded, {"item_id": counts({}), "surface": counts({})}, rules).version == grown.version
    value = json.loads((tmp_path / "vocabulary.json").read_text())
    assert value["format"] == 2
    assert value["tables"]["item_id"] == {
        "rows": 5,
        "capacity": 8,
        "fallbacks": 2,
        "fallback_types": ["t1", "t2"],
        "fallback_by": "kind",
    }
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / "item_id.arrow"))).read_all()
    assert table.schema.names == ["id", "row", "fallback", "count"]
    assert table["row"].to_pylist() == [4, -1]
    assert table["fallback"].to_pylist() == [2, 3]


@pytest.mark.parametrize("damage", ["format", "rows", "missing", "no-json"])
def test_damage_is_a_format_error(tmp_path: Path, damage: str) -> None:
    """Another format number, other content, a missing file, no JSON: one clear error."""
    save(grow(None, {"item_id": counts({"a": 1})}, {"item_id": Rule()}), tmp_path)
    path = tmp_path / "vocabulary.json"
    value = json.loads(path.read_text())
    if damage == "format":
        path.write_text(json.dumps({**value, "format": 1}))
    elif damage == "rows":
        value["tables"]["item_id"]["rows"] = 9
        path.write_text(json.dumps(value))
    elif damage == "missing":
        (tmp_path / "item_id.arrow").unlink()
    else:
        path.write_text("{")

    with pytest.raises(FormatError) as error:
        load(tmp_path)

    assert str(tmp_path) in error.value.message
