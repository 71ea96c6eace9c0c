"""Homes that were moved or copied: what names a file below a home's nights is read as below the home where it lies now.

The journal and the stages' manifests hold whole URIs. A backup restored elsewhere, a renamed folder or another bucket
leaves them naming a place that is no more, or, after a copy, another home's files.
"""

from __future__ import annotations

from typing import Any

_BELOW = "/nights/"
_AS_THEY_ARE = ("config", "difference")  # what a person wrote
_ROOTS = ("/", "s3://", "file://")


def rebased(values: Any, home: str) -> Any:
    """Return JSON values with every URI below a home's nights as below `home`.

    Args:
        values: JSON values; texts that are no URI, and configs, stay as they are.
        home: URI of the home.
    """
    if isinstance(values, dict):
        return {key: value if key in _AS_THEY_ARE else rebased(value, home) for key, value in values.items()}
    if isinstance(values, list):
        return [rebased(value, home) for value in values]
    if not isinstance(values, str) or _BELOW not in values or not values.startswith(_ROOTS) or " " in values:
        return values
    root = home.rstrip("/")
    return values if values.startswith(f"{root}{_BELOW}") else f"{root}{_BELOW}{values.rpartition(_BELOW)[2]}"
