"""URIs: the one place that knows how bytes are kept (local files or s3://).

A path is a URI; one without a scheme is local. Writing is atomic everywhere: a reader sees the old
state or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gr_core.atomic import write_whole
from gr_core.environment import scan_options, storage_options
from gr_core.errors import DamagedFile
from gr_core.lake import folders, remote
from gr_core.lake.remote import answering
from gr_core.lake.trouble import named
from gr_core.lake.uris import delta_file, delta_uri, is_local, join, local_path, writable

__all__ = [
    "answering",
    "delta_file",
    "delta_uri",
    "directory",
    "exists",
    "filesystem",
    "is_complete",
    "is_local",
    "join",
    "listing",
    "local_copy",
    "local_path",
    "matching",
    "named",
    "read_all",
    "read_bytes",
    "read_json",
    "read_range",
    "read_ranges",
    "remove",
    "remove_leftovers",
    "remove_tree",
    "scan_options",
    "storage_options",
    "upload",
    "writable",
    "write_bytes",
    "write_json",
]


def filesystem(uri: str) -> Any:
    """Return the fsspec filesystem of an s3:// URI; listings are never cached, so never stale (case C3)."""
    del uri
    return remote.filesystem()


def exists(uri: str) -> bool:
    """Tell whether a file or directory exists; of a remote directory, also one whose upload broke off."""
    return local_path(uri).exists() if is_local(uri) else remote.exists(uri)


def is_complete(uri: str) -> bool:
    """Tell whether a directory is there as `directory` or `upload` made it: whole."""
    return local_path(uri).is_dir() if is_local(uri) else folders.is_complete(uri)


def listing(uri: str) -> list[remote.Object]:
    """List all files below a directory by name, with size and version; asked anew each time (case C3).

    Directory markers of an object store are left out. Empty where there is no directory.
    """
    if not is_local(uri):
        return remote.listing(uri)
    base = local_path(uri)
    found = []
    for path in sorted(path for path in base.rglob("*") if path.is_file()):
        stat = path.stat()
        name = path.relative_to(base).as_posix()
        found.append(remote.Object(name, str(path), stat.st_size, str(stat.st_mtime_ns)))
    return sorted(found, key=lambda one: one.name)


def matching(root: str, pattern: str) -> list[remote.Object]:
    """List the objects below an s3:// root that match a glob pattern, asked anew each time; see remote.matching."""
    return remote.matching(root, pattern)


def read_bytes(uri: str) -> bytes:
    """Return a file's bytes; FileNotFoundError where there is none."""
    return local_path(uri).read_bytes() if is_local(uri) else remote.read(uri)


def read_all(wanted: Sequence[str]) -> list[bytes]:
    """Return the bytes of several files, of an object store read side by side."""
    if any(is_local(uri) for uri in wanted):
        return [read_bytes(uri) for uri in wanted]
    return remote.read_all(wanted)


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return `length` bytes of a file from `offset` on; fewer where it ends before.

    Raises:
        FileNotFoundError: There is no such file.
        StoreUnavailable: The object store did not answer.
    """
    return read_ranges(uri, [(offset, length)])[0]


def read_ranges(uri: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return parts of a file in the order asked for, of an object store read side by side.

    Args:
        uri: The file.
        ranges: (offset, length) of each part, bytes.

    Raises:
        FileNotFoundError: There is no such file.
        StoreUnavailable: The object store did not answer.
    """
    if not is_local(uri):
        return remote.read_ranges(uri, ranges)
    with local_path(uri).open("rb") as stream:
        return [os.pread(stream.fileno(), length, offset) for offset, length in ranges]


def write_bytes(uri: str, content: bytes) -> None:
    """Write a file whole or not at all; UsageError where nothing can be written locally."""
    if not is_local(uri):
        remote.write(uri, content)
        return
    path = local_path(uri)
    with writable(uri):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda stream: stream.write(content))


def remove(uri: str) -> None:
    """Remove a file; nothing happens where there is none."""
    if is_local(uri):
        local_path(uri).unlink(missing_ok=True)
    else:
        remote.remove(uri)


def remove_tree(uri: str) -> None:
    """Remove a directory with all that is below it; nothing happens where there is none."""
    if not is_local(uri):
        folders.remove_tree(uri)
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(local_path(uri))


def remove_leftovers(uri: str) -> None:
    """Remove this machine's unfinished copies of folders on an object store, which killed processes left behind."""
    if not is_local(uri):
        folders.remove_leftovers()


def read_json(uri: str) -> Any:
    """Return a JSON file's value; FileNotFoundError where there is none, DamagedFile where it is no JSON."""
    try:
        return json.loads(read_bytes(uri))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{uri} is damaged, it is no JSON: {error}; restore it from a backup", where=uri) from error


def write_json(uri: str, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_bytes(uri, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def local_copy(uri: str) -> Path:
    """Return a local directory with what a directory holds: itself where local, else a cached download.

    The store is asked at every call, so an overwritten directory is fetched again; one whose upload broke off is not
    there. A local path is returned whether or not it exists.

    Raises:
        FileNotFoundError: The object store has no complete directory there.
        FormatError: The objects differ from what was uploaded.
        ConfigError: Credentials, rights or the bucket.
        StoreUnavailable: The object store did not answer.
    """
    return local_path(uri) if is_local(uri) else folders.local_copy(uri)


def upload(folder: Path, uri: str) -> None:
    """Put a local folder at an s3:// URI, whole or not at all, over any earlier one; it is moved into the cache.

    Raises:
        ConfigError: Credentials, rights or the bucket.
        StoreUnavailable: The object store did not answer; the folder stays, and a second try sends what is missing.
    """
    folders.upload(folder, uri)


@contextlib.contextmanager
def directory(uri: str) -> Iterator[Path]:
    """Yield an empty local directory that becomes `uri` when the block ends without an error.

    Locally the directory is renamed into place, over any earlier one. On an object store it is uploaded so that no
    reader ever sees a part of it, or a mixture with an earlier one (gr_core.lake.folders).

    Raises:
        UsageError: Locally, nothing can be written there.
        ConfigError: Credentials, rights or the bucket of an object store.
        StoreUnavailable: The object store did not answer.
    """
    if not is_local(uri):
        work = folders.workplace(uri)
        try:
            yield work
            folders.upload(work, uri)
        finally:
            folders.discard(work)
        return
    target = local_path(uri)
    with writable(uri):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".tmp-{target.name}-"))
    try:
        yield work
        with writable(uri):
            _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(work: Path, target: Path) -> None:
    if not target.exists():
        work.rename(target)
        return
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    target.rename(old)
    work.rename(target)
    shutil.rmtree(old)
