"""From sequences to packs as stages: resumed bucket by bucket, and never more than a bucket of tokens in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.tiny as tiny
from gr_core.data import vocabulary
from gr_core.stages import packing, sequencing
from tests.plain import run

DAY = tiny.FIRST_DAY


def digests(packs: dict[str, Any]) -> dict[str, str]:
    return {role: packs[role]["digest"] for role in sequencing.ROLES}


def test_encoding_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two buckets: the finished one is reused, the other is made, the packs are those of one go."""
    config = tiny.make(tmp_path, days=1)
    _, whole = run(config, tmp_path / "whole", DAY, stop_after="pack")
    night, done = run(config, tmp_path / "home", DAY, stop_after="vocabulary")
    first, second = done["sequences"]
    made = packing.encode_bucket(night, first, done["vocabulary"], 0)
    with monkeypatch.context() as patched:
        patched.setattr(vocabulary, "rows_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            packing.encode_bucket(night, second, done["vocabulary"], 1)

    _, again = run(config, tmp_path / "home", DAY, stop_after="pack")

    assert [part["reused"] for part in again["encode"]] == [True, False]
    assert again["encode"][0]["digest"] == made["digest"]
    assert digests(again["pack"]) == digests(whole["pack"])


def test_a_damaged_encoding_is_made_again(tmp_path: Path) -> None:
    """A flipped bit in a bucket's embedding rows is noticed; the same rows are made again."""
    config = tiny.make(tmp_path, days=1)
    _, done = run(config, tmp_path / "home", DAY, stop_after="pack")
    path = Path(done["encode"][1]["uri"]) / "item_id.rows.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    _, again = run(config, tmp_path / "home", DAY, stop_after="pack")

    assert [part["reused"] for part in again["encode"]] == [True, False]
    assert [part["digest"] for part in again["encode"]] == [part["digest"] for part in done["encode"]]
    assert digests(again["pack"]) == digests(done["pack"])


def test_another_vocabulary_is_another_encoding(tmp_path: Path) -> None:
    """A champion's own encoding lies beside the night's and does not replace it."""
    config = tiny.make(tmp_path, days=1)
    night, done = run(config, tmp_path / "home", DAY, stop_after="pack")
    words = done["vocabulary"]

    pack = packing.encode_pack(night, done["ingest"], done["sequences"], words, "holdout", name="holdout-version-7")
    assert pack["digest"] == done["pack"]["holdout"]["digest"]
    assert pack["uri"] != done["pack"]["holdout"]["uri"]
    again = packing.encode_bucket(night, done["sequences"][0], words, 0)
    assert (again["reused"], again["uri"]) == (True, done["encode"][0]["uri"])


def test_packing_holds_a_few_batches_and_no_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a night's tokens, no array that packing asks numpy for is longer than a chunk's or the plan's."""
    config = tiny.make(tmp_path, days=1)
    night, done = run(config, tmp_path / "home", DAY, stop_after="encode")
    monkeypatch.setattr("gr_core.data.packfile.CHUNK_TOKENS", 256)
    seen: list[int] = []
    real = packing.ragged.RaggedSource.take

    def take(source: Any, segments: Any) -> Any:
        columns, events = real(source, segments)
        seen.append(len(columns["time"]))
        return columns, events

    monkeypatch.setattr(packing.ragged.RaggedSource, "take", take)
    pack = packing.write_pack(night, done["ingest"], done["sequences"], done["encode"], done["vocabulary"], "train")

    assert sum(seen) == pack["num_tokens"] > 4 * max(seen)
    assert max(seen) <= 256
    part = packing.ragged.read(Path(done["sequences"][0]["uri"]))
    assert isinstance(part.rows, np.ndarray)
    assert not part.rows.flags.owndata
    assert not part.rows.flags.writeable
