"""What lies in a registry's artifact store, through the library's own repository object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gr_core.errors import FormatError

REMEDY = "run its night again, which uploads it anew, or a later one where it is the champion or the one before"


def total_bytes(repository: Any, path: str | None = None) -> int:
    """Return the bytes of all files below a path of an artifact repository; 0 where there is nothing.

    Args:
        repository: An mlflow ArtifactRepository.
        path: A folder in it; None: the whole.
    """
    found = repository.list_artifacts(path)
    return sum(total_bytes(repository, one.path) if one.is_dir else int(one.file_size or 0) for one in found)


def lacks(repository: Any, wanted: Sequence[str]) -> list[str]:
    """Return which files are not in an artifact repository; they are looked up, not read.

    Args:
        repository: An mlflow ArtifactRepository.
        wanted: Their paths in it.
    """
    folders = {name.rpartition("/")[0] for name in wanted}
    found = {one.path for folder in folders for one in repository.list_artifacts(folder or None)}
    return [name for name in wanted if name not in found]


def fetch(repository: Any, folder: Path, location: str) -> Path:
    """Return the files of an artifact repository: a copy in `folder`, or themselves where they are local.

    Args:
        repository: An mlflow ArtifactRepository.
        folder: Where a copy goes; made where it is missing.
        location: Its URI.

    Raises:
        FormatError: There is nothing.
    """
    remote = urlsplit(location).scheme not in ("", "file")
    if remote:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return Path(repository.download_artifacts("", dst_path=str(folder) if remote else None))
    except Exception as error:
        if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise FormatError(f"model {location} is not there; {REMEDY}", where=location) from error
