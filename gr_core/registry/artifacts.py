"""What lies in a registry's artifact store, through the library's own repository object."""

from __future__ import annotations

from typing import Any


def total_bytes(repository: Any, path: str | None = None) -> int:
    """Return the bytes of all files below a path of an artifact repository; 0 where there is nothing.

    Args:
        repository: An mlflow ArtifactRepository.
        path: A folder in it; None: the whole.
    """
    found = repository.list_artifacts(path)
    return sum(total_bytes(repository, one.path) if one.is_dir else int(one.file_size or 0) for one in found)
