"""URIs: the one place that knows how bytes are kept (local files or s3://).

A path is a URI; one without a scheme is local. Writing is atomic everywhere: a reader sees the old
state or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec

from gr_core.atomic import write_whole
from gr_core.errors import StoreUnavailable, UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What deltalake 1.6.6 and Polars 2.1 cannot have in a table's path, however it is encoded: they panic ([ ] ^ |), find
# no history (# ?), decode twice (\ %20), or take a folder for a hive key (=)
_NOT_IN_TABLES = re.compile(r"%[0-9A-Fa-f]{2}|[#?=\[\]^|\\\x00-\x1f\x7f]")
_UNUSABLE = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def _scheme(uri: str) -> str:
    found = _SCHEME.match(uri)
    return found.group(1).lower() if found else "file"


def is_local(uri: str) -> bool:
    """Tell whether a URI names a local path: file://, or none that has a scheme."""
    return _scheme(uri) == "file"


def local_path(uri: str) -> Path:
    """Return the local path of a local URI, of file:// percent-decoded; UsageError for any other."""
    if not is_local(uri):
        raise UsageError(f"{uri} is not a local path", where=uri)
    found = _SCHEME.match(uri)
    return Path(unquote(uri[found.end() :]) if found else uri).absolute()


def delta_uri(uri: str) -> str:
    """Return a table's URI as Delta Lake wants it: percent-encoded where local.

    Raises:
        UsageError: The local path has characters that Delta Lake cannot have in it.
    """
    if not is_local(uri):
        return uri
    path = local_path(uri)
    wrong = _NOT_IN_TABLES.search(str(path))
    if wrong:
        raise UsageError(
            f"{path}: a home's path may not contain {wrong.group(0)!r}, no Delta table can be kept there; "
            "name another home with --home or DAYBREAK_HOME",
            where=str(path),
        )
    return path.as_uri()


def delta_file(uri: str) -> str:
    """Return what Delta Lake tells as a data file's URI as this store reads it: a plain path where local."""
    return unquote(uri.removeprefix("file://")) if is_local(uri) else uri


def join(uri: str, *parts: str) -> str:
    """Append path parts to a URI."""
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts)])


@contextlib.contextmanager
def _answering(uri: str) -> Iterator[None]:
    """Turn an object store's silence into the one transient error; local errors pass as they are."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_local(uri):
            raise
        raise StoreUnavailable(f"{uri} did not answer: {error}; check endpoint and credentials", where=uri) from error


@contextlib.contextmanager
def writable(uri: str) -> Iterator[None]:
    """Turn a local path where nothing can be written (below a file, a read-only folder) into one UsageError."""
    try:
        yield
    except OSError as error:
        if not is_local(uri) or error.errno not in _UNUSABLE:
            raise
        raise UsageError(
            f"{uri} cannot be written: {error}; make its folder writable, or name another home with --home or "
            "DAYBREAK_HOME",
            where=uri,
        ) from error


def filesystem(uri: str) -> Any:
    """Return the fsspec filesystem of a URI; listings are never cached, so never stale (case C3)."""
    scheme = _scheme(uri)
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=scheme != "file")


def exists(uri: str) -> bool:
    """Tell whether a file or directory exists."""
    if is_local(uri):
        return local_path(uri).exists()
    with _answering(uri):
        return bool(filesystem(uri).exists(uri))


def read_bytes(uri: str) -> bytes:
    """Return a file's bytes; FileNotFoundError where there is none."""
    if is_local(uri):
        return local_path(uri).read_bytes()
    with _answering(uri):
        content: bytes = filesystem(uri).cat_file(uri)
        return content


def write_bytes(uri: str, content: bytes) -> None:
    """Write a file whole or not at all; UsageError where nothing can be written locally."""
    if not is_local(uri):
        with _answering(uri):
            filesystem(uri).pipe_file(uri, content)
        return
    path = local_path(uri)
    with writable(uri):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda stream: stream.write(content))


def remove(uri: str) -> None:
    """Remove a file; nothing happens where there is none."""
    if is_local(uri):
        local_path(uri).unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError), _answering(uri):
        filesystem(uri).rm_file(uri)


def read_json(uri: str) -> Any:
    """Return a JSON file's value; FileNotFoundError where there is none."""
    return json.loads(read_bytes(uri))


def write_json(uri: str, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_bytes(uri, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


@contextlib.contextmanager
def directory(uri: str) -> Iterator[Path]:
    """Yield an empty local directory that becomes `uri` when the block ends without an error.

    Locally the directory is renamed into place, over any earlier one. On an object store its files
    are uploaded, manifest.json (or index.json) last, so that a reader who asks for it never sees a part.

    Raises:
        UsageError: Locally, nothing can be written there.
        StoreUnavailable: The object store did not answer.
    """
    if is_local(uri):
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
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        files = sorted(p for p in Path(name).rglob("*") if p.is_file())
        files.sort(key=lambda p: p.name in ("manifest.json", "index.json"))
        with _answering(uri):
            store = filesystem(uri)
            for path in files:
                store.put_file(str(path), join(uri, path.relative_to(name).as_posix()))


def _put_in_place(work: Path, target: Path) -> None:
    if not target.exists():
        work.rename(target)
        return
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    target.rename(old)
    work.rename(target)
    shutil.rmtree(old)


def fetch(uri: str, into: Path) -> Path:
    """Return a local copy of a directory: itself where local, else downloaded below `into`."""
    if is_local(uri):
        return local_path(uri)
    with _answering(uri):
        filesystem(uri).get(uri, str(into), recursive=True)
    return into
