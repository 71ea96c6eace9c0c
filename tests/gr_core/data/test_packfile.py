"""Pack files: batches within the budget, one segment of a user each, mapped without a copy."""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gr_core.data.packfile import PackMeta, Segments, write_pack
from gr_core.errors import ConfigError
from gr_core.hashing import file_sha256
from gr_core.refs import Bound
from gr_core.schema import pack_schema


def meta(**changes: Any) -> PackMeta:
    values: dict[str, Any] = {
        "role": "train",
        "features": ("item_id",),
        "actions": ("click", "like"),
        "supervised": 0b11,
        "token_budget": 64,
    }
    return PackMeta(**{**values, **changes})


def segments_of(shapes: list[tuple[str, int, int]], weights: list[float] | None = None) -> Segments:
    """Make segments of (user, history tokens, target tokens); item_id numbers all tokens, events are e<item_id>."""
    lengths = np.asarray([history + targets for _, history, targets in shapes], dtype=np.int64)
    total = int(lengths.sum())
    supervise = np.concatenate([np.zeros(0, int), *([0] * h + [1] * t for _, h, t in shapes)]).astype(np.uint8)
    position = np.concatenate([np.zeros(0, int), *(np.minimum(np.arange(h + t), h) for _, h, t in shapes)])
    weight = np.ones(total, dtype=np.float32)
    if weights is not None:
        weight[supervise == 1] = weights
    columns: dict[str, Any] = {
        "item_id": np.arange(total, dtype=np.int32),
        "actions": np.zeros(total, dtype=np.int32),
        "known": np.zeros(total, dtype=np.int32),
        "labels": np.zeros(total, dtype=np.int32),
        "label_known": supervise.astype(np.int32) * 0b11,
        "time": np.arange(total, dtype=np.int64),
        "position": position.astype(np.int32),
        "lo": np.zeros(total, dtype=np.int32),
        "hi": position.astype(np.int32),
        "supervise": supervise,
        "weight": weight,
    }
    events = [f"e{i}" for i in np.flatnonzero(supervise)]
    return Segments(columns=columns, lengths=lengths, users=[user for user, _, _ in shapes], event_ids=events)


def batches(path: Path) -> list[dict[str, np.ndarray]]:
    reader = pa.ipc.open_file(pa.memory_map(str(path / "pack.arrow")))
    return [
        {name: column.to_numpy(zero_copy_only=True) for name, column in zip(batch.schema.names, batch, strict=True)}
        for batch in (reader.get_batch(k) for k in range(reader.num_record_batches))
    ]


def targets(path: Path) -> list[tuple[str, str]]:
    table = pa.ipc.open_file(pa.memory_map(str(path / "targets.arrow"))).read_all()
    return list(zip(table["event_id"].to_pylist(), table["user_id"].to_pylist(), strict=True))


def test_the_index_says_what_the_pack_holds(tmp_path: Path) -> None:
    """Keys and values of the index; the file on disk is the value returned; nothing temporary stays."""
    now = round(datetime(2025, 6, 2, tzinfo=UTC).timestamp()) * 1_000_000
    bound = Bound(commit=1, cutoff_us=now, shown_before_us={"click": now - 5}, delta_version=1)
    index = write_pack(
        tmp_path, segments_of([("A", 5, 2), ("B", 1, 2)]), meta(vocabulary="v1", bound=bound, fingerprint="sha256:f")
    )

    assert json.loads((tmp_path / "index.json").read_text()) == index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "pack.arrow", "targets.arrow"]
    digests = index.pop("sha256")
    assert digests == {name: file_sha256(tmp_path / name) for name in ("pack.arrow", "targets.arrow")}
    assert index == {
        "format": 1,
        "tokens": "targets",
        "role": "train",
        "num_tokens": 10,
        "num_segments": 2,
        "num_targets": 4,
        "num_supervised": 4,
        "segment_starts": [0, 7, 10],
        "segment_users": ["A", "B"],
        "batch_segments": [0, 2],
        "batch_tokens": [10],
        "batch_weights": {"token": [4.0], "segment": [2.0], "event_weight": [4.0]},
        "vocabulary": "v1",
        "bound": {
            "commit": 1,
            "cutoff": "2025-06-02T00:00:00Z",
            "delta_version": 1,
            "cutoff_us": now,
            "shown_before_us": {"click": now - 5},
        },
        "fingerprint": "sha256:f",
        "features": ["item_id"],
        "actions": ["click", "like"],
        "supervised": 0b11,
        "layout": "packed",
        "grouping": "none",
        "token_budget": 64,
        "seed": 0,
    }


def weights_of(path: Path, split: list[Segments]) -> dict[str, list[float]]:
    """Write each micro-batch as its own pack; return the weights as a list over micro-batches."""
    found: dict[str, list[float]] = {"token": [], "segment": [], "event_weight": []}
    for number, part in enumerate(split):
        index = write_pack(path / str(number), part, meta())
        for name in found:
            found[name] += index["batch_weights"][name]
    return found


def test_example_6_batch_weights(tmp_path: Path) -> None:
    """Both tables of example 6: the weight of each micro-batch in each mode."""
    first = [segments_of([("S1", 2, 3)], [1, 0.5, 1]), segments_of([("S2", 0, 1)], [2])]
    second = [segments_of([("S1", 2, 3), ("S3", 1, 1)], [1, 0.5, 1, 1]), segments_of([("S2", 0, 2)], [2, 1])]

    assert weights_of(tmp_path / "1", first) == {"token": [3, 1], "segment": [1, 1], "event_weight": [2.5, 2]}
    assert weights_of(tmp_path / "2", second) == {"token": [4, 2], "segment": [2, 1], "event_weight": [3.5, 3]}


def test_example_6_unknown_labels_weigh_nothing(tmp_path: Path) -> None:
    """A target whose actions are all unknown is not supervised: weight 0, no row in targets.arrow."""
    segments = segments_of([("A", 1, 3)])
    segments.columns["label_known"][1:] = [0b11, 0b01, 0]
    index = write_pack(tmp_path, segments, meta())

    assert index["batch_weights"] == {"token": [2.0], "segment": [1.0], "event_weight": [2.0]}
    assert (index["num_targets"], index["num_supervised"], index["num_tokens"]) == (3, 2, 4)
    assert targets(tmp_path) == [("e1", "A"), ("e2", "A")]
    assert batches(tmp_path)[0]["supervise"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("num_tokens", [5000])
def test_counts_are_exact(tmp_path: Path, num_tokens: int) -> None:
    """5,000 loss tokens weigh exactly 5000 (case F24)."""
    index = write_pack(tmp_path, segments_of([("A", 0, num_tokens)]), meta(token_budget=num_tokens))

    assert index["batch_weights"]["token"] == [5000.0]


shapes = st.lists(
    st.tuples(st.sampled_from([f"u{i}" for i in range(9)]), st.integers(0, 12), st.integers(1, 5)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes,
    role=st.sampled_from(["train", "next_day", "holdout"]),
    layout=st.sampled_from(["packed", "padded"]),
    grouping=st.sampled_from(["none", "sorted", "bucketed"]),
    seed=st.integers(0, 5),
)
def test_packing_properties(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[str, int, int]],
    role: Any,
    layout: Any,
    grouping: Any,
    seed: int,
) -> None:
    """No batch over budget, at most one segment of a user a batch, every token once, segments whole and unmixed."""
    path = tmp_path_factory.mktemp("pack")
    segments = segments_of(shapes)
    index = write_pack(path, segments, meta(role=role, layout=layout, grouping=grouping, seed=seed, token_budget=20))

    starts, users, bounds = index["segment_starts"], index["segment_users"], index["batch_segments"]
    parts = batches(path)
    lengths = np.diff(starts)
    assert index["batch_tokens"] == [len(part["item_id"]) for part in parts]
    flat = np.concatenate([np.zeros(0, np.int32), *(part["item_id"] for part in parts)])
    assert sorted(flat.tolist()) == list(range(segments.num_tokens))
    owner = [user for user, history, count in shapes for _ in range(history + count)]
    source_start = np.concatenate([[0], np.cumsum(segments.lengths)])
    for k, part in enumerate(parts):
        members = range(bounds[k], bounds[k + 1])
        assert len({users[s] for s in members}) == len(members) > 0
        assert len(part["item_id"]) <= 20
        if layout == "padded":
            assert max(lengths[s] for s in members) * len(members) <= 20
        for s in members:
            begin, end = starts[s] - starts[bounds[k]], starts[s + 1] - starts[bounds[k]]
            tokens = part["item_id"][begin:end]
            assert tokens[0] in source_start
            assert tokens.tolist() == list(range(tokens[0], tokens[0] + lengths[s]))
            assert {owner[token] for token in tokens} == {users[s]}
            # lo and hi count from the batch's first token and never leave the segment.
            assert (part["lo"][begin:end] == begin).all()
            assert (part["hi"][begin:end] == begin + part["position"][begin:end]).all()
    due = [(f"e{i}", owner[i]) for i in flat if segments.columns["supervise"][i]]
    assert targets(path) == due
    assert len(due) == index["num_supervised"]


def many(seed: int = 0, num_users: int = 300) -> Segments:
    rng = np.random.default_rng(seed)
    return segments_of([(f"u{i % num_users:04d}", int(rng.integers(0, 60)), 2) for i in range(num_users * 2)])


def joined(parts: list[Segments]) -> Segments:
    """Return the segments of several parts end to end."""
    return Segments(
        columns={name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        lengths=np.concatenate([part.lengths for part in parts]),
        users=[user for part in parts for user in part.users],
        event_ids=[event for part in parts for event in part.event_ids],
    )


def test_the_cut_into_buckets_cannot_show(tmp_path: Path) -> None:
    """Segments handed over in another order of users give the same files, for every role."""
    shapes = [(f"u{i}", i % 7, 1 + i % 3) for i in range(40)]
    for role in ("train", "holdout"):
        digests = set()
        for step in (1, 3, 7):
            order = [(i * step) % 40 for i in range(40)]
            segments = joined([segments_of([shapes[i]]) for i in order])
            digests.add(json.dumps(write_pack(tmp_path, segments, meta(role=role))["sha256"]))
        assert len(digests) == 1


def test_the_seed_shuffles_train_packs_only(tmp_path: Path) -> None:
    """Equal seeds give equal files, other seeds another order; the judged roles keep one order."""

    def digest(role: Any, seed: int) -> str:
        index = write_pack(tmp_path / f"{role}{seed}", many(), meta(role=role, seed=seed, token_budget=256))
        return json.dumps(index["sha256"])

    assert digest("train", 1) == digest("train", 1)
    assert digest("train", 1) != digest("train", 2)
    assert digest("holdout", 1) == digest("holdout", 2)


def test_little_of_the_budget_is_unused(tmp_path: Path) -> None:
    """First fit over open batches: under 3 % of the budget is left over, the last batch included."""
    index = write_pack(tmp_path, many(num_users=1000), meta(token_budget=1024))

    assert 1 - index["num_tokens"] / (1024 * len(index["batch_tokens"])) < 0.03


@pytest.mark.parametrize("role", ["train", "next_day"])
def test_a_heavy_user_does_not_empty_the_batches(tmp_path: Path, role: Any) -> None:
    """Fifty segments of one user beside many others: about as many batches as tokens ask for."""
    segments = segments_of([*[("heavy", 30, 2)] * 50, *[(f"u{i}", 30, 2) for i in range(1000)]])
    index = write_pack(tmp_path, segments, meta(role=role, token_budget=512))

    assert len(index["batch_tokens"]) <= 1050 * 32 / 512 * 1.1


def test_grouping_makes_like_lengths_meet(tmp_path: Path) -> None:
    """Within a batch the lengths spread less when sorted than bucketed, and less bucketed than not grouped."""
    spread = {}
    for grouping in ("none", "bucketed", "sorted"):
        index = write_pack(tmp_path, many(), meta(grouping=grouping, token_budget=256))
        lengths = np.diff(index["segment_starts"])
        cuts = index["batch_segments"]
        spread[grouping] = np.mean([np.ptp(lengths[a:b]) for a, b in itertools.pairwise(cuts)])

    assert spread["sorted"] < spread["bucketed"] < spread["none"]


def test_columns_are_mapped_without_a_copy(tmp_path: Path) -> None:
    """One uncompressed record batch a training batch, in the schema's types."""
    write_pack(tmp_path, many(), meta(token_budget=512))

    with pa.memory_map(str(tmp_path / "pack.arrow")) as source:
        before = pa.total_allocated_bytes()
        reader = pa.ipc.open_file(source)
        assert reader.schema.equals(pack_schema(("item_id",)))
        columns = [reader.get_batch(k)["time"].to_numpy(zero_copy_only=True) for k in range(reader.num_record_batches)]
        assert pa.total_allocated_bytes() - before < sum(column.nbytes for column in columns) / 4
        assert sum(map(len, columns)) == many().num_tokens


def test_an_empty_pack_is_a_pack(tmp_path: Path) -> None:
    """Nothing due: no batch, all counts 0, readable files."""
    index = write_pack(tmp_path, segments_of([]), meta())

    assert (index["num_tokens"], index["num_segments"], index["num_supervised"]) == (0, 0, 0)
    assert (index["segment_starts"], index["batch_segments"], index["batch_tokens"]) == ([0], [0], [])
    assert index["batch_weights"] == {"token": [], "segment": [], "event_weight": []}
    assert batches(tmp_path) == []
    assert targets(tmp_path) == []


def test_a_segment_over_the_budget_is_refused(tmp_path: Path) -> None:
    """Named by its key, before any file is written."""
    with pytest.raises(ConfigError, match=r"pack\.token_budget.*65 tokens, got 64"):
        write_pack(tmp_path / "pack", segments_of([("A", 60, 5)]), meta())

    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: Segments(columns={**s.columns, "lo": s.columns["lo"][1:]}, lengths=s.lengths, users=s.users,
                           event_ids=s.event_ids),
        lambda s: Segments(columns={k: v for k, v in s.columns.items() if k != "time"}, lengths=s.lengths,
                           users=s.users, event_ids=s.event_ids),
        lambda s: Segments(columns=s.columns, lengths=s.lengths, users=["A"], event_ids=s.event_ids),
        lambda s: Segments(columns=s.columns, lengths=s.lengths, users=s.users, event_ids=["e"]),
    ],
    ids=["uneven", "missing", "users", "events"],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, broken: Any) -> None:
    """Columns, lengths, users and event ids must speak of the same tokens."""
    with pytest.raises(ValueError, match=r"must have|need as many"):
        write_pack(tmp_path, broken(segments_of([("A", 1, 2), ("B", 1, 1)])), meta())
