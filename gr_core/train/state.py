"""Checkpoints: tensors as safetensors through torch's distributed checkpoint, all else in JSON; no pickle anywhere.

A checkpoint is a directory: *.safetensors, state.json (what a person wants to read), vocabulary/<table>.arrow, and
manifest.json with every file's SHA-256, written last. It is made beside its place and renamed into it, so a directory
with a manifest is complete. steps.arrow is the night's series (gr_core.train.series).

`cursor` in state.json is {"batch": consumed, "batches": of the night's pack}. A running training leaves checkpoints whose
cursor is not at the end in `<output>.steps/step-<lineage's step, 8 digits>/` (gr_core.train.saving): complete in
themselves, for scoring and for going on, but no parents. They go when the final one, `<output>`, is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gr_core.errors import FormatError
from gr_core.formats import CHECKPOINT_FORMAT, RETRAIN, check_format, listed_files
from gr_core.hashing import file_sha256

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"


def checkpoint_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return "sha256:..." over the tensors sorted by name: name, dtype, shape, bytes of each."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return "sha256:" + total.hexdigest()


def save_checkpoint(
    path: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    vocabulary: Mapping[str, Path],
    more: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Write a checkpoint; what stood at `path` is replaced only when the new one is complete.

    Args:
        path: The checkpoint's directory.
        tensors: By name.
        state: JSON values; `format` and `digest` are added.
        vocabulary: Table name to <table>.arrow, copied in.
        more: Further files by name.

    Returns:
        The state as written.
    """
    # this import costs half a second, and a checkpoint is only read by most processes
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    making, old = path.with_name(f".{path.name}.making"), path.with_name(f".{path.name}.old")
    for leftover in (making, old):
        shutil.rmtree(leftover, ignore_errors=True)
    making.mkdir(parents=True)
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: that is the intent
        save(kept, storage_writer=HuggingFaceStorageWriter(path=str(making)), no_dist=True)
    if vocabulary:
        (making / "vocabulary").mkdir()
        for name, source in vocabulary.items():
            shutil.copyfile(source, making / "vocabulary" / f"{name}.arrow")
    for name, content in (more or {}).items():
        (making / name).write_bytes(content)
    text = json.dumps({"format": CHECKPOINT_FORMAT, **state, "digest": checkpoint_digest(kept)}, indent=1)
    (making / STATE_FILE).write_text(text + "\n", encoding="utf-8")
    files = sorted(file for file in making.rglob("*") if file.is_file())
    manifest = {"format": CHECKPOINT_FORMAT, "files": {str(f.relative_to(making)): file_sha256(f) for f in files}}
    (making / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    if path.exists():
        os.replace(path, old)
    os.replace(making, path)
    shutil.rmtree(old, ignore_errors=True)
    written: dict[str, Any] = json.loads(text)
    return written


def read_state(path: Path) -> dict[str, Any]:
    """Return a complete checkpoint's state.json.

    Raises:
        FormatError: No manifest (so it is not complete), unreadable JSON, or another format number.
    """
    if not (path / MANIFEST_FILE).exists():
        raise FormatError(
            f"{path} has no {MANIFEST_FILE}, so it is no complete checkpoint; train again", where=str(path)
        )
    state = _read_json(path / STATE_FILE)
    check_format("checkpoint", str(path), state.get("format"), CHECKPOINT_FORMAT, RETRAIN)
    return state


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors by name, and its state.

    Raises:
        FormatError: As `verify`; or no tensors. A damaged checkpoint is never trained on or scored with.
    """
    verify(path)
    state = read_state(path)
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except Exception as error:
            raise FormatError(f"{file} cannot be read: {error}; restore or train again", where=str(file)) from error
    if not tensors:
        raise FormatError(f"{path} has no tensors; restore or train again", where=str(path))
    return tensors, state


def steps_folder(output: Path) -> Path:
    """Return where the checkpoints of a running training lie, given its output."""
    return output.with_name(f"{output.name}.steps")


def step_path(output: Path, step: int) -> Path:
    """Return where the checkpoint of a lineage's step lies, given the training's output."""
    return steps_folder(output) / f"step-{step:08d}"


def step_checkpoints(output: Path) -> list[Path]:
    """Return the checkpoints of a running training, oldest first; complete or damaged, but none in the making."""
    return sorted(steps_folder(output).glob("step-*"))


def remove_steps(output: Path) -> None:
    """Remove a training's step checkpoints: its final one is there, or it starts anew."""
    shutil.rmtree(steps_folder(output), ignore_errors=True)


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with the manifest.

    Raises:
        FormatError: Not complete, or a file is missing or differs; names it.
    """
    read_state(path)
    manifest = path / MANIFEST_FILE
    for name, expected in listed_files(_read_json(manifest), str(manifest)).items():
        file = path / name
        if not file.exists() or file_sha256(file) != expected:
            raise FormatError(
                f"{file} is missing or differs from the manifest (sha256); restore or train again", where=str(file)
            )


def tensors_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether every floating tensor is finite: nothing else may become a parent."""
    return all(bool(np.isfinite(t.detach().cpu().numpy()).all()) for t in tensors.values() if t.is_floating_point())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{values!r:.40} is no object")
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}; restore or train again", where=str(path)) from error
    return values
