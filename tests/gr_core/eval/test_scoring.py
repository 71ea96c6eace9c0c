"""Scoring: order, owners, and a parent on its child's pack."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest

from gr_core.data.batches import PackReader
from gr_core.errors import FormatError
from gr_core.eval.scoring import score_pack
from gr_core.train import loop

GROWN = {"item_id": 46, "kind": 9, "surface": 6}


def quiet(line):
    del line


@pytest.fixture
def parent(packs, users):
    loop.train(packs.run(packs.pack("train", users, token_budget=120), "parent"), quiet)
    return packs.root / "parent"


def write_vocabulary(path, fallback):
    """Write a child's vocabulary whose rows from 40 on are new."""
    path.mkdir()
    for table, rows in GROWN.items():
        ids = list(range(3, rows))
        columns = {
            "id": [str(i) for i in ids],
            "row": pa.array(ids, pa.int32()),
            "fallback": pa.array([fallback] * len(ids), pa.int32()),
        }
        table_of = pa.table(columns)
        with pa.OSFile(str(path / f"{table}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table_of.schema) as writer:
            writer.write_table(table_of)
    tables = {name: {"rows": rows, "capacity": 64, "fallbacks": 1} for name, rows in GROWN.items()}
    (path / "vocabulary.json").write_text(json.dumps({"format": 1, "version": "v2", "tables": tables}))


def test_scores_stand_in_pack_order_with_their_owners(packs, users, parent):
    """Row n is the pack's n-th supervised token: labels, time, user, event; the digest is the pack's."""
    pack = packs.pack("eval", users, role="holdout", token_budget=120)
    by_event = {
        f"{u.name}:{i}": (int(u.labels[t]), int(u.label_known[t]), int(u.time[t]))
        for u in users
        for i, t in enumerate(np.flatnonzero(u.supervise))
    }

    scored = score_pack(parent, pack)

    got = zip(scored.labels.tolist(), scored.label_known.tolist(), scored.time.tolist(), strict=True)
    assert list(got) == [by_event[event] for event in scored.event_ids]
    assert scored.users == [event.split(":")[0] for event in scored.event_ids]
    assert scored.logits.shape == (len(by_event), 2)
    assert scored.logits.dtype == np.float32
    assert (scored.actions, scored.action_bits) == (["click", "like"], [0, 1])
    assert scored.digest == PackReader(pack).digest
    assert np.isfinite(scored.logits).all()


def test_a_parent_on_its_childs_pack_equals_itself_on_its_own(packs, users, parent):
    """Rows that the parent does not know map to their fallback: the logits are equal bit for bit."""
    rng = np.random.default_rng(0)
    child_rows = [
        np.where(rng.random(len(u.time)) < 0.3, rng.integers(40, 46, len(u.time)), u.rows["item_id"]) for u in users
    ]
    child = [dataclasses.replace(u, rows={**u.rows, "item_id": r}) for u, r in zip(users, child_rows, strict=True)]
    own = [
        dataclasses.replace(u, rows={**u.rows, "item_id": np.where(r < 40, r, 2)})
        for u, r in zip(users, child_rows, strict=True)
    ]
    write_vocabulary(packs.root / "words", fallback=2)

    on_child = score_pack(
        parent, packs.pack("child", child, role="next_day", vocabulary="v2"), vocabulary=packs.root / "words"
    )
    on_own = score_pack(parent, packs.pack("own", own, role="next_day"))
    without = score_pack(parent, packs.root / "child")

    assert np.array_equal(on_child.logits, on_own.logits)
    assert np.array_equal(without.logits, on_own.logits)


def test_scoring_is_the_same_for_any_batching_within_rounding(packs, users, parent):
    """Another token budget changes no score by more than 1e-5."""
    small = score_pack(parent, packs.pack("s", users, role="holdout", token_budget=64))
    large = score_pack(parent, packs.pack("l", users, role="holdout", token_budget=256))
    order = [large.event_ids.index(event) for event in small.event_ids]

    assert np.allclose(small.logits, large.logits[order], atol=1e-5)


def test_an_empty_pack_scores_to_nothing(packs, users, parent):
    """No supervised token: zero rows of the right shapes."""
    blank = [dataclasses.replace(u, label_known=u.label_known * 0, labels=u.labels * 0) for u in users]

    scored = score_pack(parent, packs.pack("none", blank, role="next_day"))

    assert (scored.logits.shape, scored.time.dtype, scored.users) == ((0, 2), np.int64, [])


def test_a_pack_of_other_features_or_actions_is_refused(packs, users, parent):
    """Other features or actions than the checkpoint's are named."""
    cut = [dataclasses.replace(u, rows={"item_id": u.rows["item_id"]}) for u in users]
    cases = [
        (FormatError, "features", packs.pack("f", cut, features=("item_id",))),
        (FormatError, "actions", packs.pack("a", users, actions=("click", "like"))),
    ]
    for error, match, pack in cases:
        with pytest.raises(error, match=match):
            score_pack(parent, pack)
    with pytest.raises(FormatError, match="no complete checkpoint"):
        score_pack(packs.root / "nowhere", cases[0][2])
