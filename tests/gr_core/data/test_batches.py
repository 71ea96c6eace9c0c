"""A pack read back: zero-copy views, relative starts, and refusal of what is damaged or of another format."""

import json
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from gr_core.data import batches
from gr_core.data.batches import PackReader
from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.errors import FormatError
from gr_core.hashing import file_sha256
from gr_core.schema import PACK_COLUMNS


def test_batches_hold_the_written_columns(tokens, packs, users):
    """All batches together are the written segments; lo and hi count from the batch's first token."""
    path = packs.pack("p", users, token_budget=120)
    reader = PackReader(path)
    by_user = {user.name: user.columns() for user in users}

    seen = 0
    for number, batch in enumerate(reader):
        first = int(np.searchsorted(np.cumsum(reader.index["batch_tokens"]), seen, side="right"))
        assert first == number == batch.number
        begin, end = reader.index["batch_segments"][number : number + 2]
        assert batch.segment_starts[-1] == batch.num_tokens == reader.index["batch_tokens"][number]
        for place, name in enumerate(reader.index["segment_users"][begin:end]):
            start, stop = batch.segment_starts[place : place + 2]
            assert batch.time[start:stop].tolist() == by_user[name]["time"].tolist()
            assert (batch.lo[start:stop] - start).tolist() == by_user[name]["lo"].tolist()
            assert batch.rows["kind"][start:stop].tolist() == by_user[name]["kind"].tolist()
        assert batch.weights["token"] == int(batch.supervise.sum())
        seen += batch.num_tokens
    assert len(reader) > 1
    assert seen == sum(len(user.time) for user in users)


def test_tensors_are_views_of_the_mapped_file(packs, users):
    """Two reads of a batch share memory, and writing to a view never reaches the file."""
    path = packs.pack("p", users)
    reader = PackReader(path)
    before = (path / "pack.arrow").read_bytes()

    first, second = reader.batch(0), reader.batch(0)
    first.actions[0] = 77

    assert first.actions.data_ptr() == second.actions.data_ptr()
    assert second.actions[0] == 77
    assert (path / "pack.arrow").read_bytes() == before
    assert first.weight.dtype == torch.float32
    assert first.time.dtype == torch.int64


def columns_of(batch):
    """Return all columns of a batch."""
    others = {name: getattr(batch, name) for name in PACK_COLUMNS}
    return {**batch.rows, **others, "starts": torch.from_numpy(batch.segment_starts)}


@pytest.mark.parametrize("group_bytes", [1, 20_000, 2**24])
def test_reading_ahead_gives_the_same_batches(packs, users, monkeypatch, group_bytes):
    """Order, columns, types and memory are those of the plain reader, however many batches are handed over at once."""
    monkeypatch.setattr(batches, "_FIRST_GROUP_BYTES", group_bytes)
    monkeypatch.setattr(batches, "_GROUP_BYTES", group_bytes)
    reader = PackReader(packs.pack("p", users, token_budget=70))

    with reader.ahead() as ahead:
        seen = list(ahead)

    assert [batch.number for batch in seen] == list(range(len(reader)))
    assert len(seen) >= 4
    for batch, plain in zip(seen, reader, strict=True):
        ours, theirs = columns_of(batch), columns_of(plain)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
        assert batch.time.data_ptr() == plain.time.data_ptr()
        assert batch.weights == plain.weights


def test_reading_ahead_takes_any_numbers_and_may_stop(packs, users):
    """Chosen batches come in the given order; leaving in the middle leaves no thread and no open file."""
    reader = PackReader(packs.pack("p", users, token_budget=70))
    numbers = [3, 1, 2, 0]

    with reader.ahead(numbers) as ahead:
        assert [batch.number for batch in ahead] == numbers
    files = len(list(Path("/proc/self/fd").iterdir()))
    with reader.ahead(depth=1) as ahead:
        assert next(ahead).number == 0

    assert [thread for thread in threading.enumerate() if thread.name == "daybreak-prefetch"] == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_reading_ahead_tells_of_nulls(packs):
    """An error that a batch raises reaches the consumer."""
    reader = PackReader(packs.example_9("h", labels={2: None}).parent / "packs/train")

    with pytest.raises(FormatError, match=r"nulls in .*labels"), reader.ahead() as ahead:
        list(ahead)


@pytest.mark.parametrize("column", ["item_id", "labels", "weight"])
def test_a_null_in_any_column_is_found(packs, column):
    """Also in the first and in the last column, where no later one moves."""
    holed = packs.example_9("h").parent / "packs/train"
    with pa.OSFile(str(holed / "pack.arrow"), "rb") as source:
        table = pa.ipc.open_file(source).read_all()
    values = table.column(column).to_pylist()
    values[2] = None
    field = table.schema.field(column)
    table = table.set_column(table.schema.names.index(column), field, pa.array(values, field.type))
    with pa.OSFile(str(holed / "pack.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    packs.edit(holed, sha256={"pack.arrow": file_sha256(holed / "pack.arrow")})

    with pytest.raises(FormatError, match=rf"nulls in \['{column}'\]"):
        PackReader(holed).batch(0)


def test_an_empty_pack_has_no_batches(tokens, packs, users):
    """A pack without segments reads as zero batches and no targets."""
    empty = tokens.join(users[:1])
    columns = {name: column[:0] for name, column in empty.columns.items()}
    nothing = Segments(columns=columns, lengths=np.empty(0, np.int64), users=[], event_ids=[])
    meta = PackMeta(role="next_day", features=tokens.FEATURES, actions=tokens.ACTIONS, supervised=3, token_budget=64)
    write_pack(packs.root / "e", nothing, meta)

    reader = PackReader(packs.root / "e")

    assert len(reader) == 0
    assert reader.targets() == ([], [])


def test_targets_name_events_and_users_in_pack_order(packs, users):
    """Each supervised token has its event and its user, in the order of the tokens."""
    reader = PackReader(packs.pack("p", users))

    events, owners = reader.targets()

    assert len(events) == sum(int(batch.supervise.sum()) for batch in reader)
    assert [event.split(":")[0] for event in events] == owners


def test_a_flipped_byte_is_refused(packs, users):
    """A pack whose rows do not match the index's digest is a format error, naming the file."""
    path = packs.pack("p", users)
    content = bytearray((path / "pack.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "pack.arrow").write_bytes(content)

    with pytest.raises(FormatError, match=r"pack\.arrow.*sha256"):
        PackReader(path)


def test_what_is_no_pack_is_refused(tmp_path, packs, users):
    """No index, an index of another format, or one that does not fit the rows: each is named."""
    with pytest.raises(FormatError, match="no finished pack"):
        PackReader(tmp_path)
    path = packs.pack("p", users)
    packs.edit(path, features=["item_id"])
    with pytest.raises(FormatError, match="columns"):
        PackReader(path)
    packs.edit(path, features=["item_id", "kind", "surface"], batch_segments=[0])
    with pytest.raises(FormatError, match="batches"):
        PackReader(path)
    packs.edit(path, format=2)
    with pytest.raises(FormatError, match="format 2"):
        PackReader(path)
    (path / "index.json").write_text("{")
    with pytest.raises(FormatError, match="no JSON"):
        PackReader(path)


def test_an_index_as_in_example_9_is_filled_from_the_rows(packs):
    """Features are the other columns, supervised the due bits, actions all bits in use; what the index says stays."""
    path = packs.example_9("e").parent / "packs/train"

    index = PackReader(path).index

    assert (index["features"], index["actions"], index["supervised"]) == (["item_id"], ["action_0", "action_1"], 0b11)
    assert (index["layout"], index["grouping"], index["token_budget"]) == ("packed", "none", 10)
    assert index["bound"]["cutoff_us"] == 1_748_822_400_000_000
    assert PackReader(path).batch(0).hi.tolist() == [0, 1, 2, 3, 4, 4, 5, 7, 7, 8]

    named = packs.example_9("n", actions=["click", "like", "hate"], supervised=0b01).parent / "packs/train"
    assert PackReader(named).index["actions"] == ["click", "like", "hate"]
    assert PackReader(named).index["supervised"] == 0b01


def test_what_example_9_says_is_required(packs):
    """A key that example 9 has and the index lacks, a null, and missing targets are format errors by name."""
    path = packs.example_9("e").parent / "packs/train"
    with pytest.raises(FormatError, match=r"targets\.arrow"):
        PackReader(path).targets()
    index = json.loads((path / "index.json").read_text())
    del index["batch_weights"]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="batch_weights"):
        PackReader(path)
    holed = packs.example_9("h", labels={2: None}).parent / "packs/train"
    with pytest.raises(FormatError, match=r"nulls in .*labels"):
        PackReader(holed).batch(0)


def test_equal_rows_have_equal_digests(packs, users):
    """The digest follows the rows: equal for a repeated write, another for other rows."""
    first, again = PackReader(packs.pack("a", users)), PackReader(packs.pack("b", users))
    other = PackReader(packs.pack("c", [users[0].change("labels", 0, 0), *users[1:]]))

    assert first.digest == again.digest
    assert (first.digest != other.digest) == (users[0].labels[0] != 0)
