"""Local files written whole or not at all; standard library only, so that bare machines have it too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name that feeds ignore, sync it, and rename it into place.

    Args:
        path: The file; its folder exists.
        write: Writes the content to the open stream.

    Raises:
        OSError: Whatever the disk raises; the old file stays and no temporary one remains.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
