"""What a night asks of a checkpoint before it opens, without torch; training verifies the rest."""

from __future__ import annotations

import contextlib

from gr_core.errors import FormatError
from gr_core.formats import CHECKPOINT_FORMAT, RETRAIN, check_format
from gr_core.lake import store


def check_readable(checkpoint: str) -> None:
    """Refuse a checkpoint that a release of another format wrote.

    Args:
        checkpoint: URI of a checkpoint; one that is not there, or is damaged, is left to who reads it.

    Raises:
        FormatError: Names the file, its format, ours, and what to do.
    """
    uri = store.join(checkpoint, "state.json")
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
        check_format("checkpoint", uri, store.read_json(uri).get("format"), CHECKPOINT_FORMAT, RETRAIN)


def check_there(version: int, checkpoint: str) -> None:
    """Refuse to start from a version whose checkpoint is gone, before a night is opened for it (case E11).

    Args:
        version: The version.
        checkpoint: URI of its checkpoint.

    Raises:
        FormatError: It has no manifest, so it is gone or was never complete; says how to put it back.
    """
    if not store.exists(store.join(checkpoint, "manifest.json")):
        raise FormatError(
            f"version {version} has no checkpoint any more at {checkpoint}, so no night can start from it; put the folder "
            "back from a backup, or from the version's registered model (data/checkpoint in it), or go back with "
            "`daybreak rollback`",
            where=checkpoint,
        )
