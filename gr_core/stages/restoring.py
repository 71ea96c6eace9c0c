"""Model files that the registry has lost: a projection, uploaded again from the checkpoints in the home."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gr_core import environment
from gr_core.formats import listed_files
from gr_core.lake import store
from gr_core.lake.journal import Entry, champion, previous, versions
from gr_core.registry.base import ModelStore

logger = logging.getLogger(__name__)


def missing(models: ModelStore, version: int, checkpoint: str) -> list[str]:
    """Return which files of a registered model the registry has lost; they are looked up, not read.

    Args:
        models: The registry.
        version: The version.
        checkpoint: URI of its checkpoint.

    Raises:
        FileNotFoundError: The checkpoint is gone too.
        FormatError: Its manifest is damaged.
        UsageError: The registry has no such version.
    """
    manifest = store.join(checkpoint, "manifest.json")
    return models.missing(version, [*listed_files(store.read_json(manifest), manifest), "manifest.json"])


def restore(models: ModelStore, version: int, checkpoint: str) -> None:
    """Upload a version's files again where any is gone; raises what `missing` and the registry do."""
    gone = missing(models, version, checkpoint)
    if gone:
        logger.warning("the registry has lost %s of version %d: uploaded again from the checkpoint", gone, version)
        models.restore(version, store.local_copy(checkpoint))


def restore_champions(models: ModelStore, entries: Sequence[Entry]) -> None:
    """Restore the champion and the one before it; nights do not need them there, so what cannot be had is only told.

    Args:
        models: The registry.
        entries: The journal's.
    """
    known = versions(entries)
    for one in (champion(entries), previous(entries)):
        if one is None or one.version not in known:
            continue
        checkpoint = known[one.version].checkpoint
        try:
            restore(models, one.version, checkpoint)
        except Exception as error:  # noqa: BLE001 -- a registry of any make may fail in any way
            logger.warning(
                "whether the registry has lost files of version %d is not known, or %s cannot replace them: %s; nights "
                "do not need them there, restore them from a backup for who does",
                *(one.version, checkpoint, environment.without_secrets(f"{type(error).__name__}: {error}")),
            )
