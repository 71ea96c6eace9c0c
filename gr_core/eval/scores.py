"""A checkpoint's logits on a pack, kept in a file, so that who needs them next does not score again.

Only logits are kept: labels, users and events are read from the pack, so a pack that lost a user gives none of his. The
file names the checkpoint and the pack it belongs to, and is used for no others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gr_core.atomic import write_whole
from gr_core.data.batches import PackReader
from gr_core.eval.scoring import Scored

LOGITS_FILE = "logits.safetensors"


def keep(folder: Path, scored: Scored, checkpoint: str) -> None:
    """Write a checkpoint's logits on a pack, whole or not at all.

    Args:
        folder: Made where it is missing.
        scored: The scores.
        checkpoint: Digest of the checkpoint.
    """
    told = {"checkpoint": checkpoint, "pack": scored.digest, "actions": scored.actions, "bits": scored.action_bits}
    content = save({"logits": np.ascontiguousarray(scored.logits)}, {key: json.dumps(v) for key, v in told.items()})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / LOGITS_FILE, lambda stream: stream.write(content))


def kept(folder: Path, pack: Path, checkpoint: str) -> Scored | None:
    """Return what `Scorer.score` returned for this checkpoint and pack.

    Args:
        folder: Where `keep` wrote.
        pack: Directory of the pack.
        checkpoint: Digest of the checkpoint.

    Returns:
        The scores; None where none are kept, or only those of another checkpoint or other rows, or damaged ones.

    Raises:
        FormatError: The pack is damaged.
    """
    try:
        with safe_open(folder / LOGITS_FILE, framework="np") as opened:
            told = {key: json.loads(value) for key, value in (opened.metadata() or {}).items()}
            logits = opened.get_tensor("logits")
    except (OSError, ValueError, SafetensorError):
        return None
    reader = PackReader(pack)
    if (told.get("checkpoint"), told.get("pack")) != (checkpoint, reader.digest):
        return None
    parts = [(torch.empty(0, dtype=torch.int32),) * 2 + (torch.empty(0, dtype=torch.int64),)]
    with reader.ahead() as batches:
        for batch in batches:
            at = batch.supervise > 0
            if batch.weights["token"] > 0:
                parts.append((batch.labels[at], batch.label_known[at], batch.time[at]))
    labels, label_known, time = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    event_ids, users = reader.targets()
    if not len(logits) == len(labels) == len(users):
        return None
    return Scored(
        logits=logits,
        labels=labels,
        label_known=label_known,
        time=time,
        users=users,
        event_ids=event_ids,
        actions=told["actions"],
        action_bits=told["bits"],
        digest=reader.digest,
    )
