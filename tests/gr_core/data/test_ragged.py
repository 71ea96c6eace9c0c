"""Rows of several buckets as one source of segments: the same tokens, whatever is asked for at a time."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from gr_core.data import ragged
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.ragged import FIRST_CODE, RaggedSource
from gr_core.data.sequences import Sequences, build_sequences, save
from tests.sequences import US, rules, table


def bucket(number: int, num_events: int = 80) -> Sequences:
    """Random users of one bucket, some due events, items that other buckets number otherwise."""
    rng = np.random.default_rng(number)
    rows = [
        {
            "id": f"b{number}-e{i}",
            "user": f"u{rng.integers(0, 5)}-{number}",
            "item": f"i{rng.integers(0, 9)}",
            "shown": int(rng.integers(0, 9000)),
            "taken": {"like": int(rng.integers(0, 20_000))} if i % 3 else {},
            "due": int(rng.integers(0, 3)),
        }
        for i in range(num_events)
    ]
    events = table(rows)
    masks = {"train": events["due"], "next_day": events["due"] * (pl.Series(range(num_events)) % 2)}
    return build_sequences(events, masks, rules(max_history=6, max_targets=4, time_window_us=4000 * US))


def source(parts: list[Sequences], role: int) -> RaggedSource:
    """Give every id its own number as embedding row."""
    tables = [
        {
            name: np.asarray([0, 1, *(int.from_bytes(text.encode()[:3]) for text in ids["id"])], dtype=np.int32)
            for name, ids in part.ids.items()
        }
        for part in parts
    ]
    return RaggedSource([part.ragged for part in parts], tables, role)


@pytest.mark.parametrize("role", [0b01, 0b10])
def test_segments_in_any_order_and_company_have_the_same_tokens(role: int) -> None:
    """All at once, one by one, bucket by bucket: equal columns, event ids and lengths."""
    parts = [bucket(number) for number in range(3)]
    together = source(parts, role)
    order = np.random.default_rng(0).permutation(len(together.lengths))
    columns, events = together.take(order)
    ends = np.cumsum(together.lengths[order])

    alone = [source([part], role) for part in parts]
    first = np.cumsum([0, *(len(one.lengths) for one in alone)])
    told = iter(events.to_pylist())
    for segment, end in zip(order, ends, strict=True):
        part = int(np.searchsorted(first, segment, side="right")) - 1
        expected, ids = alone[part].take(np.asarray([segment - first[part]]))
        own = slice(end - together.lengths[segment], end)
        for name, values in expected.items():
            np.testing.assert_array_equal(columns[name][own], values, err_msg=name)
        assert [next(told) for _ in range(int(expected["supervise"].sum()))] == ids.to_pylist()
        assert (expected["lo"] <= expected["hi"]).all()
        assert (expected["lo"] >= 0).all()
    assert together.users.to_pylist() == [user for one in alone for user in one.users.to_pylist()]


def test_packs_are_the_same_however_many_batches_are_gathered_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch at a time, a few, all: equal indexes, digests included; from memory or from files."""
    parts = [bucket(number) for number in range(4)]
    meta = PackMeta(
        role="train", features=("item_id", "surface"), actions=("click", "like"), supervised=3, token_budget=32
    )
    expected = write_pack(tmp_path / "whole", source(parts, 1), meta)
    assert len(expected["batch_tokens"]) > 5
    mapped = []
    for number, part in enumerate(parts):
        (tmp_path / str(number)).mkdir()
        save(part, tmp_path / str(number))
        mapped.append(Sequences(ragged=ragged.read(tmp_path / str(number)), ids=part.ids))
    for chunk in (1, 100):
        monkeypatch.setattr("gr_core.data.packfile.CHUNK_TOKENS", chunk)
        assert write_pack(tmp_path / f"chunk-{chunk}", source(mapped, 1), meta) == expected


def test_ranges_are_laid_end_to_end() -> None:
    """Empty ranges leave no trace."""
    found = ragged.ranges(np.asarray([5, 9, 0, 7]), np.asarray([2, 0, 3, 1]))

    assert found.tolist() == [5, 6, 0, 1, 2, 7]
    assert ragged.ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    assert ragged.width(1) == ragged.width(2) == ragged.WORDS + 2
    assert FIRST_CODE == 2
