"""Folders on an object store: uploaded so that no reader sees a part, read through a local copy that is never stale.

A folder is complete while it has COMPLETE: the size and SHA-256 of every file. An upload removes it first and writes
it last, so what an interrupted upload leaves behind is no folder, and a reader whom an upload overtakes notices it by
the digests. Copies lie in a local cache under URI and digest of COMPLETE: an overwritten folder is another entry.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gr_core import environment
from gr_core.errors import FormatError, StoreUnavailable
from gr_core.formats import check_format
from gr_core.hashing import file_sha256
from gr_core.lake import remote, uris

logger = logging.getLogger(__name__)

COMPLETE = "_COMPLETE.json"
_FORMAT = 1
_ATTEMPTS = 3
_WORK = "work"
_in_use: set[Path] = set()


def workplace(uri: str) -> Path:
    """Return a new empty local folder, named as the URI's last part, beside the copies; `discard` removes it."""
    root = environment.cache_directory() / _WORK
    root.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=root, prefix=f"{os.getpid()}-")) / uri.rstrip("/").rpartition("/")[2]
    path.mkdir()
    return path


def discard(work: Path) -> None:
    """Remove a workplace, also one that was moved away."""
    shutil.rmtree(work.parent, ignore_errors=True)


def upload(folder: Path, uri: str) -> None:
    """Make a local folder the one at `uri`; the folder itself is moved into the cache as its local copy.

    Nothing of an earlier folder stays. Files that an interrupted upload of equal content left are not sent again.

    Raises:
        ConfigError: Credentials, rights or the bucket.
        StoreUnavailable: The store did not answer; there is no folder at `uri` then, and `folder` is as it was.
    """
    files = _described(folder)
    remote.remove(uris.join(uri, COMPLETE))
    remote.remove_objects(uri, [found.name for found in remote.listing(uri) if found.name not in files])
    remote.put_files(folder, uri, files)
    complete = (json.dumps({"format": _FORMAT, "files": files}, indent=1, sort_keys=True) + "\n").encode()
    remote.write(uris.join(uri, COMPLETE), complete)
    _keep(folder, _entry(uri, complete))


def local_copy(uri: str) -> Path:
    """Return a local copy of a complete folder: the cached one while the store still has it so, else a new download.

    Raises:
        FileNotFoundError: There is no complete folder.
        FormatError: The folder is of another format, or its objects do not fit its digests.
        ConfigError: Credentials, rights or the bucket.
        StoreUnavailable: The store did not answer, or the folder was overwritten again and again meanwhile.
    """
    before = b""
    for _ in range(_ATTEMPTS):
        complete = _complete(uri)
        files = _files(uri, complete)
        entry = _entry(uri, complete)
        if _is_whole(entry, files):
            return _used(entry)
        if complete == before:
            raise FormatError(f"{uri}: its objects differ from {COMPLETE} (sha256); make it again", where=uri)
        work = workplace(uri)
        try:
            remote.get_files(uri, sorted(files), work)
            if all(file_sha256(work / name) == told["sha256"] for name, told in files.items()):
                return _keep(work, entry)
        except FileNotFoundError:
            logger.info("%s lost a file while it was read; looking again", uri)
        finally:
            discard(work)
        before = complete
    raise StoreUnavailable(f"{uri} was overwritten each time it was read; run it again", where=uri)


def is_complete(uri: str) -> bool:
    """Tell whether a folder was uploaded whole."""
    try:
        _complete(uri)
    except FileNotFoundError:
        return False
    return True


def remove_tree(uri: str) -> None:
    """Remove a folder, and before it this machine's copies of it and of all folders below: a kill leaves none of them.

    What makes it a folder goes first of its objects.
    """
    names = [found.name for found in remote.listing(uri)]
    below = [uris.join(uri, name.removesuffix(f"/{COMPLETE}")) for name in names if name.endswith(f"/{COMPLETE}")]
    for folder in [uri, *below]:
        shutil.rmtree(_copies(folder), ignore_errors=True)
    remote.remove(uris.join(uri, COMPLETE))
    remote.remove_objects(uri, names)


def remove_leftovers() -> None:
    """Remove what killed processes of this machine had not uploaded yet, or were downloading."""
    for left in _inside(environment.cache_directory() / _WORK):
        process = left.name.partition("-")[0]
        if Path("/proc/self").exists() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def _described(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in paths
    }


def _complete(uri: str) -> bytes:
    try:
        return remote.read(uris.join(uri, COMPLETE))
    except FileNotFoundError:
        raise FileNotFoundError(f"{uri} is not there, or was not uploaded whole (no {COMPLETE})") from None


def _files(uri: str, complete: bytes) -> dict[str, dict[str, Any]]:
    told = json.loads(complete)
    check_format("folder", uri, told.get("format"), _FORMAT, "make it again")
    files: dict[str, dict[str, Any]] = told["files"]
    return files


def _entry(uri: str, complete: bytes) -> Path:
    return _copies(uri) / hashlib.sha256(complete).hexdigest()[:16] / uri.rstrip("/").rpartition("/")[2]


def _copies(uri: str) -> Path:
    return environment.cache_directory() / hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:16]


def _is_whole(entry: Path, files: dict[str, dict[str, Any]]) -> bool:
    try:
        return entry.is_dir() and all((entry / name).stat().st_size == told["size"] for name, told in files.items())
    except FileNotFoundError:
        return False


def _used(entry: Path) -> Path:
    _in_use.add(entry)
    os.utime(entry)  # the order in which copies are given up
    return entry


def _keep(folder: Path, entry: Path) -> Path:
    """Move a folder into the cache, over a damaged or equal copy, and give up the oldest beyond the limit."""
    work = workplace(entry.name)
    try:
        shutil.move(folder, work / "new")  # also from another disk
        entry.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            entry.rename(work / "old")
        try:
            (work / "new").rename(entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another process put the same content there meanwhile
    finally:
        discard(work)
    _used(entry)
    _tidy()
    return entry


def _tidy() -> None:
    """Remove the workplaces of dead processes, and the copies that were used longest ago beyond cache_bytes()."""
    remove_leftovers()
    root = environment.cache_directory()
    spare = environment.cache_bytes()
    versions = [version for copies in _inside(root) if copies.name != _WORK for version in _inside(copies)]
    found = [_measured(entry) for version in versions for entry in _inside(version)]
    for _, size, entry in sorted(found, reverse=True):
        spare -= size
        if spare < 0 and entry not in _in_use:
            shutil.rmtree(entry.parent, ignore_errors=True)


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []  # given up by another thread or process


def _measured(entry: Path) -> tuple[int, int, Path]:
    """Return a copy's last use (nanoseconds) and its size in bytes; zeros where another process gave it up."""
    try:
        return entry.stat().st_mtime_ns, sum(path.stat().st_size for path in entry.rglob("*")), entry
    except FileNotFoundError:
        return 0, 0, entry
