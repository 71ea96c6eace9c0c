"""Format numbers of what is stored: each says which release can read it; the standard library alone.

A number is raised by hand when files of the old kind cannot be read any more. A reader meets an older file with a remedy,
a newer one with the advice to use the release that wrote it, and never with a KeyError in its middle.
"""

from __future__ import annotations

from typing import Any

from gr_core.errors import FormatError

CHECKPOINT_FORMAT = 1
JOURNAL_FORMAT = 1
RETRAIN = "start a new lineage with a full retrain"


def check_format(what: str, where: str, found: Any, ours: int, remedy: str) -> None:
    """Refuse what this release does not read.

    Args:
        what: Kind of file, for the message.
        where: Its path or URI.
        found: Its number; anything that is no number counts as older.
        ours: The number that this release writes and reads.
        remedy: What to do about an older one.

    Raises:
        FormatError: Names the file, its format, ours, and what to do.
    """
    if found == ours and not isinstance(found, bool):
        return
    newer = isinstance(found, int) and found > ours
    advice = "a newer release wrote it: use that one, or a later one" if newer else remedy
    raise FormatError(f"{where} has {what} format {found!r}, this release reads {ours}; {advice}", where=where)


def listed_files(manifest: Any, where: str) -> dict[str, str]:
    """Return what the manifest of a checkpoint lists: the SHA-256 of each file by its name.

    Args:
        manifest: The value in manifest.json.
        where: Path or URI of that file.

    Raises:
        FormatError: It lists no files.
    """
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise FormatError(f"{where} cannot be read: it lists no files; restore or train again", where=where)
    return files
