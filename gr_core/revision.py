"""Which source made a model: the git revision of the checkout that runs. Recorded with every version, never compared."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path

_SECONDS = 10.0


@lru_cache(maxsize=1)
def git_revision(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Return the git revision of a package's source.

    Args:
        folder: The package's folder.

    Returns:
        revision (40 hex digits) and dirty ("true": tracked files differ from it, "false"); empty outside a checkout,
        where git is not installed, and where the folder only lies inside another project's checkout (site-packages).
    """
    try:
        if not _git(folder, "ls-files", "--error-unmatch", "__init__.py"):
            return {}
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/")
        return {"revision": _git(folder, "rev-parse", "HEAD"), "dirty": str(bool(changed)).lower()}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *words: str) -> str:
    """Return what git says of a folder, without taking its locks."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout.strip()
