"""Logits kept in a file: what comes back is what scoring gave, or nothing."""

import numpy as np
import pytest

from gr_core.eval import scores
from gr_core.eval.scoring import Scored, score_pack
from gr_core.train import loop


def quiet(line):
    del line


@pytest.fixture
def checkpoint(packs, users):
    return loop.train(packs.run(packs.pack("train", users, token_budget=120), "trained"), quiet)


def same(one: Scored, other: Scored) -> bool:
    arrays = ("logits", "labels", "label_known", "time")
    values = ("users", "event_ids", "actions", "action_bits", "digest")
    return all(np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays) and all(
        getattr(one, v) == getattr(other, v) for v in values
    )


def test_kept_scores_are_what_scoring_gave(packs, users, checkpoint):
    """Logits from the file and rows from the pack make the very scores, several batches and dtypes included."""
    pack = packs.pack("holdout", users, role="holdout", token_budget=64)
    scored = score_pack(packs.root / "trained", pack)
    scores.keep(packs.root / "kept", scored, checkpoint["digest"])

    found = scores.kept(packs.root / "kept", pack, checkpoint["digest"])

    assert found is not None
    assert same(found, scored)
    assert (found.labels.dtype, found.time.dtype) == (np.int32, np.int64)


def test_an_empty_pack_is_kept_too(packs, users, checkpoint):
    """A pack without a row gives scores of no row, not none."""
    pack = packs.pack("holdout", [users[0].change("label_known", 0, 0).change("label_known", 1, 0)], role="holdout")
    scored = score_pack(packs.root / "trained", pack)
    scores.keep(packs.root / "kept", scored, checkpoint["digest"])

    found = scores.kept(packs.root / "kept", pack, checkpoint["digest"])

    assert found is not None
    assert same(found, scored)


def test_scores_of_another_checkpoint_or_pack_are_none(packs, users, checkpoint):
    """Another checkpoint's digest, other rows, a torn file or no file: None, so that whoever asks scores himself."""
    pack = packs.pack("holdout", users, role="holdout")
    fewer = packs.pack("fewer", users[:-1], role="holdout")
    folder = packs.root / "kept"
    scores.keep(folder, score_pack(packs.root / "trained", pack), checkpoint["digest"])

    assert scores.kept(folder, pack, "sha256:another") is None
    assert scores.kept(folder, fewer, checkpoint["digest"]) is None
    assert scores.kept(packs.root / "nowhere", pack, checkpoint["digest"]) is None
    file = folder / scores.LOGITS_FILE
    file.write_bytes(file.read_bytes()[:-8])
    assert scores.kept(folder, pack, checkpoint["digest"]) is None
