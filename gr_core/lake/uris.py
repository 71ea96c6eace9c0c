"""URIs and the local paths among them. A path is a URI; one without a scheme is local, all others are s3://."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from gr_core.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What deltalake 1.6.6 and Polars 2.1 cannot have in a table's path, however it is encoded: they panic ([ ] ^ |), find
# no history (# ?), decode twice (\ %20), or take a folder for a hive key (=)
_NOT_IN_TABLES = re.compile(r"%[0-9A-Fa-f]{2}|[#?=\[\]^|\\\x00-\x1f\x7f]")
_UNUSABLE = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def scheme(uri: str) -> str:
    """Return a URI's scheme in lower case; "file" where it has none."""
    found = _SCHEME.match(uri)
    return found.group(1).lower() if found else "file"


def is_local(uri: str) -> bool:
    """Tell whether a URI names a local path: file://, or none that has a scheme."""
    return scheme(uri) == "file"


def local_path(uri: str) -> Path:
    """Return the local path of a local URI, of file:// percent-decoded; UsageError for any other."""
    if not is_local(uri):
        raise UsageError(f"{uri} is not a local path", where=uri)
    found = _SCHEME.match(uri)
    return Path(unquote(uri[found.end() :]) if found else uri).absolute()


def split_remote(uri: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// URI.

    Raises:
        UsageError: Another scheme, no bucket, or a name and password in the URI (they belong in the environment).
    """
    if scheme(uri) != "s3":
        raise UsageError(f"{uri}: only local paths and s3:// can be read and written", where=uri)
    bucket, _, key = uri[len("s3://") :].partition("/")
    if "@" in bucket:
        raise UsageError(
            "an s3:// URI may not contain credentials; take them out and set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if not bucket:
        raise UsageError(f"{uri}: an s3:// URI needs a bucket, as in s3://bucket/prefix", where=uri)
    return bucket, key.strip("/")


def delta_uri(uri: str) -> str:
    """Return a table's URI as Delta Lake wants it: percent-encoded where local.

    Raises:
        UsageError: The local path has characters that Delta Lake cannot have in it, or the URI is no s3:// one.
    """
    if not is_local(uri):
        split_remote(uri)
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
