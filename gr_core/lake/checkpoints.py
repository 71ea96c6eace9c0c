"""What a night asks of a checkpoint before it opens, without torch; training verifies the rest."""

from __future__ import annotations

import contextlib

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
