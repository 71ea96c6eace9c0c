"""Tables: pad rows, fallback rows, known rows, growth along a lineage, id drop."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from gr_core.errors import FormatError
from gr_core.model.embeddings import RowMap, Tables, TableSpec, read_fallbacks, read_tables


def write_table(path, rows, fallbacks):
    table = pa.table({"id": [str(r) for r in rows], "row": pa.array(rows, pa.int32()), "fallback": fallbacks})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def test_pad_rows_start_at_zero_and_item_zero_has_its_own_row():
    """Every table's pad row is zero, every other row is not (case E16)."""
    tables = Tables([TableSpec(name="a", rows=5, capacity=8), TableSpec(name="b", rows=4, capacity=4)], 8)

    zero = (tables.weight == 0).all(dim=1)

    assert zero.nonzero().squeeze(1).tolist() == [0, 5]
    assert tables.map.pad_rows().tolist() == [0, 5]


def test_initial_weights_follow_from_seed_and_table_alone():
    """The same seed gives the same rows, another seed others; a further table changes nothing in the first."""
    spec, other = TableSpec(name="a", rows=9, capacity=16), TableSpec(name="b", rows=3, capacity=4)

    assert torch.equal(Tables([spec], 8, seed=1).weight, Tables([spec], 8, seed=1).weight)
    assert torch.equal(Tables([spec, other], 8, seed=1).weight[:9], Tables([spec], 8, seed=1).weight)
    assert not torch.equal(Tables([spec], 8, seed=2).weight, Tables([spec], 8, seed=1).weight)


def test_rows_at_or_above_the_known_ones_map_to_their_fallback():
    """A parent with 6 rows sees a child's rows 6, 7 as their fallback rows 3 and 2, and the rest as they are."""
    fallback_of = np.array([2, 2, 2, 2, 2, 3, 3, 2], np.int64)
    child = TableSpec(name="a", rows=8, capacity=8, fallbacks=2, fallback_of=fallback_of)
    first = TableSpec(name="z", rows=4, capacity=4)

    mapped = RowMap([first, child], {"z": 4, "a": 6}).map("a", np.arange(8, dtype=np.int32))

    assert (mapped - 4).tolist() == [0, 1, 2, 3, 4, 5, 3, 2]


def test_rows_beyond_the_table_map_to_row_2():
    """Without the pack's vocabulary, an unknown row is the first fallback row."""
    assert RowMap([TableSpec(name="a", rows=4, capacity=4)]).map("a", np.array([3, 4, 90], np.int32)).tolist() == [
        3,
        2,
        2,
    ]


def test_id_drop_hits_its_share_and_keeps_reserved_rows():
    """About the given share goes to the row's own fallback; pad, unknown and fallback rows stand for themselves."""
    spec = TableSpec(name="a", rows=10, capacity=16, fallbacks=2, fallback_of=np.array([2] * 7 + [3] * 3))
    row_map = RowMap([spec])
    rows = np.tile(np.arange(10), 2000)

    dropped = row_map.drop("a", rows, 0.2, np.random.default_rng(0))

    changed = dropped != rows
    assert set(dropped[changed & (rows >= 7)]) == {3}
    assert set(dropped[changed & (rows < 7)]) == {2}
    assert not changed[rows < 4].any()
    assert 0.18 < changed[rows >= 4].mean() < 0.22
    assert np.array_equal(dropped, row_map.drop("a", rows, 0.2, np.random.default_rng(0)))


def test_growth_keeps_old_rows_and_starts_new_ones_at_their_fallback():
    """Table 5 to 7 rows (case F5): old rows and state bit-exact; new rows have their fallback's value and state."""
    parent = Tables([TableSpec(name="a", rows=5, capacity=8, fallbacks=2)], 4, seed=3)
    parent.accumulator[:] = torch.arange(5.0)
    grown = TableSpec(name="a", rows=7, capacity=8, fallbacks=2, fallback_of=np.array([2, 2, 2, 2, 2, 3, 2]))
    child = Tables([grown], 4, seed=9)

    child.load(parent.state())

    assert torch.equal(child.weight[:5], parent.weight)
    assert torch.equal(child.weight[5:], parent.weight[[3, 2]])
    assert child.accumulator.tolist() == [0, 1, 2, 3, 4, 3, 2]


def test_a_shrunken_or_new_table_is_refused():
    """Fewer rows than the parent, or a table it does not have, is an error by name."""
    parent = Tables([TableSpec(name="a", rows=5, capacity=8)], 4)
    with pytest.raises(FormatError, match="rows never shrink"):
        Tables([TableSpec(name="a", rows=4, capacity=8)], 4).load(parent.state())
    with pytest.raises(FormatError, match="full retrain"):
        Tables([TableSpec(name="b", rows=5, capacity=8)], 4).load(parent.state())


def test_tables_are_read_from_run_json(tmp_path):
    """Rows, capacity and fallbacks come from RUN.json, the fallback of each row from the table's file."""
    write_table(tmp_path / "a.arrow", [4, -1, 5], pa.array([3, 2, 2], pa.int32()))

    spec, plain = read_tables(
        {"a": {"rows": 6, "capacity": 8, "fallbacks": 2, "path": "a.arrow"}, "b": {"rows": 4}}, tmp_path
    )

    assert spec.fallback_rows().tolist() == [0, 1, 2, 3, 3, 2]
    assert (plain.capacity, plain.fallbacks, plain.fallback_rows().tolist()) == (4, 1, [0, 1, 2, 2])


def test_a_damaged_or_foreign_vocabulary_is_refused(tmp_path):
    """A missing file, a file that is no Arrow, and rows above those in use are format errors."""
    (tmp_path / "bad.arrow").write_text("no")
    write_table(tmp_path / "big.arrow", [9], pa.array([2], pa.int32()))
    for name in ("missing", "bad", "big"):
        with pytest.raises(FormatError, match="vocabulary table"):
            read_fallbacks(tmp_path / f"{name}.arrow", 6)
