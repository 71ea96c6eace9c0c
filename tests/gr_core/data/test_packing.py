"""From events to a pack: example 2 as files, and every due (event, action) in a pack exactly once."""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from gr_core.config import VocabularyTable as Rule
from gr_core.data.packfile import PackMeta, write_pack
from gr_core.data.sequences import build_sequences
from gr_core.data.vocabulary import COUNTS, Vocabulary, grow, merge_counts
from gr_core.hashing import bucket_of
from gr_core.refs import Bound
from tests.sequences import TIME, US, count_ids, rules, source_of

EVENTS = pl.Schema(
    {
        **dict.fromkeys(("event_id", "user_id", "item_id", "kind", "surface"), pl.String),
        **dict.fromkeys(("shown_at", "visible_at", "click_at", "like_at"), TIME),
        **dict.fromkeys(("actions", "known", "due"), pl.Int32),
    }
)


def event(id_: str, item: str, shown: int, *, clicked: int | None = None, liked: int | None = None, **more: Any) -> Any:
    return {
        "event_id": id_,
        "user_id": id_[0].upper(),
        "item_id": item,
        "kind": f"t{item}",
        "surface": "home",
        "shown_at": shown * US,
        "visible_at": (shown + 1800) * US,
        "click_at": clicked and clicked * US,
        "like_at": liked and liked * US,
        "actions": (clicked is not None) + 2 * (liked is not None),
        "known": 0b11,
        "due": 0,
        **more,
    }


# Examples, section 2. Items p, q, r, s, t stand for the item rows 6 to 10.
EXAMPLE = pl.DataFrame(
    [
        event("a1", "p", 1000, clicked=1010, liked=4000),
        event("a2", "q", 1100),
        event("a3", "r", 1200, liked=1500),
        event("a4", "q", 5000, clicked=5020, due=0b11),
        event("a5", "s", 7000, due=0b11),
        event("b1", "p", 2000),
        event("b2", "s", 3000, clicked=3005, due=0b11),
        event("b3", "t", 4000, known=0b01, due=0b01),
    ],
    schema=EVENTS,
)
LO_WITH_W = [0, 0, 0, 0, 3, 0, 3, 7, 7, 7]
TABLE = """
0  6   0b01 0b11 2800 0 0 0 0 0    0
1  7   0b00 0b11 2900 0 1 1 0 0    0
2  8   0b10 0b11 3000 0 2 2 0 0    0
3  6   0b10 0b11 4000 0 3 3 0 0    0
4  7   0b01 0b11 6800 0 4 4 0 0    0
5  7   0    0    5000 0 4 4 1 0b01 0b11
6  9   0    0    7000 0 5 5 1 0b00 0b11
7  6   0b00 0b11 3800 7 7 0 0 0    0
8  9   0    0    3000 7 7 0 1 0b01 0b11
9  10  0    0    4000 7 8 1 1 0b00 0b01
"""
COLUMNS = ["item_id", "actions", "known", "time", "lo", "hi", "position", "supervise", "labels", "label_known"]
MASK = """
1 . . . . . . . . .
1 1 . . . . . . . .
1 1 1 . . . . . . .
1 1 1 1 . . . . . .
1 1 1 1 1 . . . . .
1 1 1 1 . 1 . . . .
1 1 1 1 1 . 1 . . .
. . . . . . . 1 . .
. . . . . . . . 1 .
. . . . . . . 1 . 1
"""


INTERLEAVED = """
0  6   0    0    1000 0 0  0 0 0    0
1  0   0b01 0b11 2800 0 1  1 0 0    0
2  7   0    0    1100 0 0  2 0 0    0
3  0   0b00 0b11 2900 0 3  3 0 0    0
4  8   0    0    1200 0 0  4 0 0    0
5  0   0b10 0b11 3000 0 5  5 0 0    0
6  0   0b10 0b11 4000 0 6  6 0 0    0
7  7   0    0    5000 0 7  7 1 0b01 0b11
8  0   0b01 0b11 6800 0 8  8 0 0    0
9  9   0    0    7000 0 9  9 1 0b00 0b11
10 6   0    0    2000 10 10 0 0 0    0
11 0   0b00 0b11 3800 10 11 1 0 0    0
12 9   0    0    3000 10 10 2 1 0b01 0b11
13 10  0    0    4000 10 12 3 1 0b00 0b01
"""
INTERLEAVED_MASK = """
1 . . . . . . . . . . . . .
1 1 . . . . . . . . . . . .
. . 1 . . . . . . . . . . .
1 1 1 1 . . . . . . . . . .
. . . . 1 . . . . . . . . .
1 1 1 1 1 1 . . . . . . . .
1 1 1 1 1 1 1 . . . . . . .
1 1 1 1 1 1 1 1 . . . . . .
1 1 1 1 1 1 1 1 1 . . . . .
1 1 1 1 1 1 1 1 1 1 . . . .
. . . . . . . . . . 1 . . .
. . . . . . . . . . 1 1 . .
. . . . . . . . . . . . 1 .
. . . . . . . . . . 1 1 . 1
"""


def example_vocabulary() -> Vocabulary:
    """Four item types, so rows 2 to 5 are fallbacks and the items p to t have the rows 6 to 10."""
    kinds = ["t1", "t2", "t3", "t4", "t1"]
    rows = [(item, kind, 1) for item, kind in zip("pqrst", kinds, strict=True)]
    counts = pl.DataFrame(rows, schema=COUNTS, orient="row")
    return grow(None, {"item_id": counts}, {"item_id": Rule(fallback_by="kind")})


def write_example(path: Path, **changes: Any) -> tuple[dict[str, Any], pl.DataFrame]:
    limits = rules(features=("item_id",), **changes)
    segments = source_of([build_sequences(EXAMPLE, {"train": EXAMPLE["due"]}, limits)], example_vocabulary())
    cutoff = round(datetime(2025, 6, 2, tzinfo=UTC).timestamp()) * US
    meta = PackMeta(
        role="train",
        features=("item_id",),
        actions=("click", "like"),
        supervised=0b11,
        token_budget=8192,
        tokens=limits.tokens,
        vocabulary="v1",
        bound=Bound(commit=1, cutoff_us=cutoff, delta_version=1),
        fingerprint="sha256:...",
    )
    index = write_pack(path, segments, meta)
    return index, pl.from_arrow(pa.ipc.open_file(str(path / "pack.arrow")).read_all())


def test_example_2_as_a_pack(tmp_path: Path) -> None:
    """All ten tokens, their intervals and the dense mask they stand for."""
    index, pack = write_example(tmp_path)
    expected = [tuple(int(cell, 0) for cell in line.split()[1:]) for line in TABLE.strip().splitlines()]

    assert [(*r[:3], r[3] // US, *r[4:]) for r in pack.select(COLUMNS).rows()] == expected
    assert pack["weight"].to_list() == [1.0] * 10
    assert example_vocabulary().tables["item_id"].fallbacks == 4
    mask = [
        " ".join("1" if lo <= key < hi or key == query else "." for key in range(10))
        for query, (lo, hi) in enumerate(pack.select("lo", "hi").rows())
    ]
    assert mask == MASK.strip().splitlines()
    table = pa.ipc.open_file(str(tmp_path / "targets.arrow")).read_all()
    assert table.to_pydict() == {"event_id": ["a4", "a5", "b2", "b3"], "user_id": ["A", "A", "B", "B"]}
    assert index["batch_tokens"] == [10]


def test_example_3_as_a_pack(tmp_path: Path) -> None:
    """The same events interleaved: all fourteen tokens, their intervals and the dense mask; no segment is causal."""
    index, pack = write_example(tmp_path, tokens="interleaved")
    expected = [tuple(int(cell, 0) for cell in line.split()[1:]) for line in INTERLEAVED.strip().splitlines()]

    assert [(*r[:3], r[3] // US, *r[4:]) for r in pack.select(COLUMNS).rows()] == expected
    mask = [
        " ".join("1" if lo <= key < hi or key == query else "." for key in range(14))
        for query, (lo, hi) in enumerate(pack.select("lo", "hi").rows())
    ]
    assert mask == INTERLEAVED_MASK.strip().splitlines()
    table = pa.ipc.open_file(str(tmp_path / "targets.arrow")).read_all()
    assert table.to_pydict() == {"event_id": ["a4", "a5", "b2", "b3"], "user_id": ["A", "A", "B", "B"]}
    assert (index["tokens"], index["segment_causal"], index["num_supervised"]) == ("interleaved", [False, False], 4)


def test_example_2_with_w(tmp_path: Path) -> None:
    """The last column of the table: lo with W = 3000 s, all else as before."""
    _, plain = write_example(tmp_path / "plain")
    _, window = write_example(tmp_path / "window", time_window_us=3000 * US)

    assert window["lo"].to_list() == LO_WITH_W
    assert window.drop("lo").equals(plain.drop("lo"))


def test_example_9_index(tmp_path: Path) -> None:
    """index.json of that pack, key for key."""
    example = json.loads(
        """{"format": 1, "tokens": "targets", "role": "train", "num_tokens": 10, "num_segments": 2, "num_targets": 4,
 "num_supervised": 4, "segment_starts": [0, 7, 10], "segment_users": ["A", "B"], "batch_segments": [0, 2],
 "batch_weights": {"token": [4.0], "segment": [2.0], "event_weight": [4.0]}, "vocabulary": "v1",
 "bound": {"commit": 1, "cutoff": "2025-06-02T00:00:00Z", "delta_version": 1},
 "fingerprint": "sha256:..."}"""
    )
    index, _ = write_example(tmp_path)

    assert {key: index[key] for key in example if key != "bound"} == {k: v for k, v in example.items() if k != "bound"}
    assert {key: index["bound"][key] for key in example["bound"]} == example["bound"]
    assert set(index["sha256"]) == {"pack.arrow", "targets.arrow"}


def test_a_holdout_user_has_the_same_tokens_in_the_holdout_pack(tmp_path: Path) -> None:
    """B held out: no token of B in the training pack, the same ones with supervise = 1 in the holdout pack."""
    mine = EXAMPLE.select(due=pl.when(user_id="B").then(0).otherwise("due").cast(pl.Int32)).to_series()
    held = EXAMPLE.select(due=pl.when(user_id="B").then("due").otherwise(0).cast(pl.Int32)).to_series()
    built = build_sequences(EXAMPLE, {"train": mine, "holdout": held}, rules(features=("item_id",)))
    train = source_of([built], example_vocabulary(), role=0b01)
    holdout = source_of([built], example_vocabulary(), role=0b10)

    assert train.users.to_pylist() == ["A"]
    assert holdout.users.to_pylist() == ["B"]
    columns, events = holdout.take(np.arange(1))
    assert columns["supervise"].tolist() == [0, 1, 1]
    assert columns["item_id"].tolist() == [6, 9, 10]
    assert events.to_pylist() == ["b2", "b3"]


def random_events(num_events: int) -> pl.DataFrame:
    rng = np.random.default_rng(5)
    rows = []
    for i in range(num_events):
        shown = int(rng.integers(0, 5000))
        rows.append(
            event(
                f"e{i}",
                f"i{rng.zipf(1.5) % 50}",
                shown,
                clicked=shown + int(rng.integers(0, 4000)) if rng.random() < 0.3 else None,
                user_id=f"u{int(rng.zipf(1.3)) % 60}",
                kind=f"t{rng.integers(0, 3)}",
                surface=[None, "home", "feed"][rng.integers(0, 3)],
                due=int(rng.integers(0, 4)) if rng.random() < 0.6 else 0,
            )
        )
    return pl.DataFrame(rows, schema=EVENTS)


def pack_of(events: pl.DataFrame, path: Path, num_buckets: int) -> dict[str, Any]:
    features = ("item_id", "surface")
    admission = {"item_id": Rule(min_count=3, fallback_by="kind"), "surface": Rule()}
    limits = rules(
        features=features, fallback_by=(("item_id", "kind"),), max_history=20, max_targets=6, token_budget=128
    )
    buckets = events.with_columns(
        bucket=pl.col("user_id").map_elements(lambda user: bucket_of(user, num_buckets), return_dtype=pl.Int64)
    )
    parts = [buckets.filter(bucket=number) for number in range(num_buckets)]
    counted = [count_ids(part, features, admission) for part in parts]
    words = grow(None, {name: merge_counts([part[name] for part in counted]) for name in features}, admission)
    built = [build_sequences(part, {"train": part["due"]}, limits) for part in parts]
    segments = source_of(built, words)
    meta = PackMeta(
        role="train",
        features=features,
        actions=("click", "like"),
        supervised=0b11,
        token_budget=128,
        vocabulary=words.version,
        seed=4,
    )
    return write_pack(path, segments, meta)


def test_every_due_action_is_in_the_pack_exactly_once(tmp_path: Path) -> None:
    """(event, due bits) of the pack are those of the table; no batch over budget; one segment of a user a batch."""
    events = random_events(1500)
    index = pack_of(events, tmp_path, num_buckets=4)

    reader = pa.ipc.open_file(str(tmp_path / "pack.arrow"))
    pack = pl.from_arrow(reader.read_all())
    rows = pl.from_arrow(pa.ipc.open_file(str(tmp_path / "targets.arrow")).read_all())
    rows = rows.with_columns(due=pack.filter(supervise=1)["label_known"], labels=pack.filter(supervise=1)["labels"])
    expected = events.filter(pl.col("due") != 0).select(
        "event_id", "user_id", "due", labels=pl.col("actions") & pl.col("due")
    )
    assert rows.sort("event_id").equals(expected.sort("event_id"))
    assert max(index["batch_tokens"]) <= 128
    users, cuts = index["segment_users"], index["batch_segments"]
    for begin, end in itertools.pairwise(cuts):
        assert len(set(users[begin:end])) == end - begin
    for name in ("item_id", "surface"):
        assert pack[name].min() >= 0
    assert (pack.filter(supervise=0)["surface"] == 0).all()
    assert (pack.filter(supervise=1)["surface"] > 0).all()
    assert (pack["item_id"] > 1).all()


@pytest.mark.parametrize("num_buckets", [1, 7])
def test_rows_in_another_order_or_other_buckets_give_the_same_pack(tmp_path: Path, num_buckets: int) -> None:
    """Shuffling the table's rows changes nothing; nor does the number of buckets."""
    events = random_events(600)
    expected = pack_of(events, tmp_path / "a", num_buckets=4)
    shuffled = pack_of(events.sample(fraction=1, shuffle=True, seed=1), tmp_path / "b", num_buckets=num_buckets)

    assert shuffled == expected
