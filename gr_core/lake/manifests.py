"""The manifests of stages: what a stage recorded of its result, read back; a damaged one is told, never passed over."""

from __future__ import annotations

import logging
from typing import Any

from gr_core.errors import DamagedFile, FormatError
from gr_core.lake import store

logger = logging.getLogger("gr_core.night")


def read(uri: str) -> dict[str, Any] | None:
    """Return a stage's manifest (fingerprint, result, ...); None where there is none.

    Args:
        uri: The manifest's file.

    Raises:
        DamagedFile: It is cut off, or no manifest.
    """
    try:
        told = store.read_json(uri)
    except FileNotFoundError:
        return None
    if not isinstance(told, dict) or "fingerprint" not in told or not isinstance(told.get("result"), dict):
        raise DamagedFile(f"{uri} is damaged, it has no fingerprint and result of a stage", where=uri)
    return told


def read_or_warn(uri: str, consequence: str) -> dict[str, Any] | None:
    """Return a stage's manifest; None where there is none, and where it is damaged, which a warning tells with its name.

    Args:
        uri: The manifest's file.
        consequence: What comes of a damaged one, for the warning.
    """
    try:
        return read(uri)
    except DamagedFile:
        logger.warning("%s is damaged; %s", uri, consequence)
        return None


def recorded(uri: str, missing: str) -> dict[str, Any]:
    """Return a manifest that must be there.

    Args:
        uri: The manifest's file.
        missing: What is said where there is none.

    Raises:
        FormatError: There is none, or it is damaged.
    """
    found = read(uri)
    if found is None:
        raise FormatError(missing, where=uri)
    return found
