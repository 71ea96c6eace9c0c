"""Checkpoints: round trip, digest, manifest, replacement, no pickle."""

import ast
import json
from pathlib import Path

import pytest
import torch

from gr_core.errors import FormatError
from gr_core.hashing import file_sha256
from gr_core.train import state as module
from gr_core.train.state import (
    checkpoint_digest,
    load_checkpoint,
    read_state,
    save_checkpoint,
    tensors_finite,
    verify,
)


def tensors(scale=1.0):
    return {
        "sparse.a.weight": torch.arange(12.0).view(4, 3) * scale,
        "dense.w": torch.ones(2),
        "optimizer.dense.w.step": torch.tensor(3.0),
        "empty": torch.zeros(0, 2),
    }


def test_round_trip(tmp_path):
    """Tensors, state and vocabulary come back as they were; the digest is that of the tensors."""
    table = tmp_path / "a.arrow"
    table.write_bytes(b"table")
    written = save_checkpoint(tmp_path / "c", tensors(), {"step": 7}, {"a": table})

    loaded, state = load_checkpoint(tmp_path / "c")

    verify(tmp_path / "c")
    assert state == written == read_state(tmp_path / "c")
    assert (state["step"], state["format"]) == (7, 1)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert checkpoint_digest(loaded) == state["digest"]
    assert (tmp_path / "c/vocabulary/a.arrow").read_bytes() == b"table"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.arrow", "c"]


def test_digest_follows_names_types_shapes_and_values():
    """Order of insertion does not matter; any name, dtype, shape or value does."""
    base = checkpoint_digest({"a": torch.zeros(4), "b": torch.ones(2)})
    assert checkpoint_digest({"b": torch.ones(2), "a": torch.zeros(4)}) == base
    for other in (
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4), "b": torch.tensor([1.0, 1.0000001])},
    ):
        assert checkpoint_digest(other) != base


def test_a_flipped_byte_is_found(tmp_path):
    """One changed byte of the tensors fails verification by file name."""
    save_checkpoint(tmp_path / "c", tensors(), {}, {})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    with pytest.raises(FormatError, match=r"safetensors.*manifest"):
        verify(tmp_path / "c")


def test_what_is_incomplete_or_of_another_format_is_refused(tmp_path):
    """No manifest is no checkpoint; another format number and broken files are named."""
    path = tmp_path / "c"
    save_checkpoint(path, tensors(), {}, {})
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(FormatError, match="format 99"):
        read_state(path)
    (path / "state.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        read_state(path)
    (path / "state.json").write_text('{"format": 1}')
    (file,) = path.glob("*.safetensors")
    file.write_bytes(b"broken")
    with pytest.raises(FormatError, match="differs from the manifest"):
        load_checkpoint(path)
    for text in ("", "null", "[]", "{}", '{"fingerprint": "x"}', '{"files": {}}', '{"files": ["state.json"]}'):
        (path / "manifest.json").write_text(text)
        with pytest.raises(FormatError, match=r"manifest\.json cannot be read.*restore or train again"):
            load_checkpoint(path)
    state = path / "state.json"
    (path / "manifest.json").write_text(json.dumps({"files": {"state.json": file_sha256(state)}}))
    with pytest.raises(FormatError, match=r"safetensors cannot be read"):
        load_checkpoint(path)
    file.unlink()
    with pytest.raises(FormatError, match="no tensors"):
        load_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(FormatError, match="no complete checkpoint"):
        read_state(path)


def test_f9_leftovers_of_a_killed_save_do_not_matter(tmp_path):
    """A half-written save beside the place is replaced; an earlier checkpoint stays until the new one is complete."""
    (tmp_path / ".c.making").mkdir()
    (tmp_path / ".c.making/model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path / "c", tensors(), {"step": 1}, {})
    save_checkpoint(tmp_path / "c", tensors(2.0), {"step": 2}, {})

    loaded, state = load_checkpoint(tmp_path / "c")

    assert state["step"] == 2
    assert torch.equal(loaded["sparse.a.weight"], tensors(2.0)["sparse.a.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_finiteness():
    """One NaN or infinity anywhere is seen; integers do not matter."""
    assert tensors_finite({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.int64)})
    assert not tensors_finite({"a": torch.tensor([1.0, torch.nan])})
    assert not tensors_finite({"a": torch.tensor([torch.inf])})


def test_no_pickle_anywhere():
    """Nothing that trains, scores or computes uses torch.save, torch.load or pickle."""
    root = Path(module.__file__).parent.parent.parent
    for folder in ("gr_core/model", "gr_core/train", "gr_core/eval", "kernels", "gr_core/data"):
        for file in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    assert (node.value.id, node.attr) not in {("torch", "save"), ("torch", "load")}, file
                if isinstance(node, ast.Import):
                    assert "pickle" not in {alias.name for alias in node.names}, file
