"""Objects on S3: one client a process, listings that are never cached, writes that stand whole or not at all.

A put is whole by itself; a large file goes up in parts that become one object at the end and are given up when one of
them fails. Conditional writes (If-None-Match, If-Match) are what makes one of two writers lose.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from gr_core import environment
from gr_core.errors import DaybreakError, StoreUnavailable
from gr_core.lake import trouble, uris

T = TypeVar("T")
S = TypeVar("S")

_AT_ONCE = 8  # requests in flight
_PART = 16 * 2**20  # bytes of one request for a large object
_PARTS_AT_ONCE = 4
_MOST_PARTS = 10_000  # of one object: S3's limit
_ATTEMPTS = 3
_BROKEN = ("ClientPayloadError", "IncompleteReadError", "ResponseStreamingError", "IncompleteRead")
# a conditional write that met another writer; NoSuchKey: the object to replace is gone
_LOST = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey")
_SHA256 = "sha256"
_clients: dict[tuple[int, str], Any] = {}


@dataclass(frozen=True, slots=True)
class Object:
    """One listed object."""

    name: str
    """Its path below what was listed."""
    uri: str
    size: int
    """Bytes."""
    etag: str
    """Tells versions apart."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it was read."""

    content: bytes
    etag: str
    age_seconds: float
    """Since its last change, by the store's own clock: machines may disagree about the time."""


def filesystem() -> Any:
    """Return this process's S3 client.

    It caches no listing (case C3) and is made anew after a fork, whose child has no event loop (case C9), and when the
    environment's credentials or endpoint change.
    """
    key = (os.getpid(), environment.store_identity())
    if key not in _clients:
        settings = {
            "connect_timeout": environment.CONNECT_SECONDS,
            "read_timeout": environment.READ_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": environment.RETRIES + 1},
        }
        client = fsspec.filesystem(
            "s3",
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs=settings,
            # of one file at a time in memory: 64 MiB, and not s3fs' 500
            default_block_size=_PART,
            max_concurrency=_PARTS_AT_ONCE,
        )
        client.retries = environment.RETRIES
        _clients[key] = client
    return _clients[key]


@contextlib.contextmanager
def answering(uri: str) -> Iterator[None]:
    """Turn an object store's refusal or silence into one named error; all other errors pass as they are.

    Raises:
        ConfigError: Credentials, rights or the bucket; see trouble.named.
        StoreUnavailable: The store did not answer.
    """
    try:
        yield
    except Exception as error:
        told = trouble.named(uri, error)
        if told is None:
            raise
        if trouble.is_unclear(error):
            told = _reason(uri) or told
        raise told from None  # the cause may quote a credential


def _reason(uri: str) -> DaybreakError | None:
    """Ask for a listing, whose refusal says why; None where it is granted."""
    bucket, key = uris.split_remote(uri)
    try:
        filesystem().call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the first error is raised where this has no name
        return trouble.named(uri, error)
    return None


def listing(uri: str) -> list[Object]:
    """List all objects below a URI, by name; directory markers are left out.

    Raises:
        ConfigError: Credentials, rights or the bucket.
        StoreUnavailable: The store did not answer.
    """
    bucket, prefix = uris.split_remote(uri)
    prefix = prefix + "/" if prefix else ""
    return _objects(bucket, prefix, _pages(uri, bucket, prefix))


def matching(root: str, pattern: str) -> list[Object]:
    """List the objects below a root whose path matches a glob pattern (* within a folder, ** folders at any depth).

    No more is listed than what begins as the pattern does. Directory markers are left out. Raises as `listing`.
    """
    bucket, base = uris.split_remote(root)
    base = base + "/" if base else ""
    begins = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    flat: dict[str, Any] = {"Delimiter": "/"} if "/" not in pattern[len(begins) :] else {}
    found = _objects(bucket, base, _pages(root, bucket, base + begins, **flat))
    return [one for one in found if _matches(one.name.split("/"), pattern.split("/"))]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not path or not pattern:
        return not path and not pattern
    if pattern[0] == "**":
        return any(_matches(path[skipped:], pattern[1:]) for skipped in range(len(path)))
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _objects(bucket: str, prefix: str, items: Iterable[dict[str, Any]]) -> list[Object]:
    found = []
    for item in items:
        name = item["Key"].removeprefix(prefix)
        if name and not name.endswith("/"):
            found.append(Object(name, f"s3://{bucket}/{item['Key']}", int(item["Size"]), str(item["ETag"])))
    return sorted(found, key=lambda one: one.name)


def _pages(uri: str, bucket: str, prefix: str, most: int = 1000, **more: str) -> Iterable[dict[str, Any]]:
    while True:
        with answering(uri):
            page = filesystem().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=most, **more)
        yield from page.get("Contents", [])
        if not page.get("IsTruncated") or most < 1000:
            return
        more["ContinuationToken"] = page["NextContinuationToken"]


def exists(uri: str) -> bool:
    """Tell whether there is an object at a URI, or any below it; asked of the store, never of a cache."""
    bucket, key = uris.split_remote(uri)
    # a list request: an answer to HEAD has no body that tells a missing bucket from a missing key
    exact = any(item["Key"] == key for item in _pages(uri, bucket, key, 1))
    return exact or any(True for _ in _pages(uri, bucket, f"{key}/" if key else "", 1))


def read(uri: str) -> bytes:
    """Return an object's bytes, of one version; FileNotFoundError where there is none.

    One request for a small object: most are. The parts of a large one are read side by side.
    """
    for _ in range(_ATTEMPTS):
        with answering(uri):
            try:
                return _read_whole(uri)
            except OSError as error:
                code = _error_code(error)
                if code == "InvalidRange":  # an empty object has no first byte
                    return b""
                if code not in ("PreconditionFailed", "412"):
                    raise
    raise StoreUnavailable(f"{uri} was overwritten each time it was read; run it again", where=uri)


def _read_whole(uri: str) -> bytes:
    first, answer = _get(uri, Range=f"bytes=0-{_PART - 1}")
    total, etag = int(answer["ContentRange"].rpartition("/")[2]), answer["ETag"]

    def part(start: int) -> bytes:
        return _get(uri, Range=f"bytes={start}-{start + _PART - 1}", IfMatch=etag)[0]

    return b"".join([first, *_each(part, range(_PART, total, _PART))])


def _get(uri: str, **conditions: str) -> tuple[bytes, dict[str, Any]]:
    """Return an object's bytes, or the part asked for, and the store's answer; a broken connection is tried again."""
    bucket, key = uris.split_remote(uri)
    client = filesystem()

    async def get() -> tuple[bytes, dict[str, Any]]:
        answer = await client._call_s3("get_object", Bucket=bucket, Key=key, **conditions)
        async with answer["Body"] as body:
            return await body.read(), answer

    for attempt in range(_ATTEMPTS):
        try:
            found: tuple[bytes, dict[str, Any]] = fsspec.asyn.sync(client.loop, get)
            return found
        except Exception as error:
            if type(error).__name__ not in _BROKEN or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def read_all(wanted: Sequence[str]) -> list[bytes]:
    """Return the bytes of several objects, read side by side; FileNotFoundError where one is missing."""
    return _each(read, wanted)


def read_ranges(uri: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return parts of an object, (offset, length) each, read side by side; empty ones cost no request."""

    def part(place: tuple[int, int]) -> bytes:
        offset, length = place
        if length <= 0:
            return b""
        with answering(uri):
            try:
                return _get(uri, Range=f"bytes={offset}-{offset + length - 1}")[0]
            except OSError as error:
                if _error_code(error) != "InvalidRange":
                    raise
                return b""  # it begins at the object's end

    return _each(part, ranges)


def write(uri: str, content: bytes) -> None:
    """Write an object whole or not at all."""
    with answering(uri):
        filesystem().pipe_file(_plain(uri), content)


def remove(uri: str) -> None:
    """Remove an object; nothing happens where there is none."""
    bucket, key = uris.split_remote(uri)
    with answering(uri):
        filesystem().call_s3("delete_object", Bucket=bucket, Key=key)


def remove_objects(uri: str, names: Sequence[str]) -> None:
    """Remove the objects of these names below a URI."""
    if names:
        with answering(uri):
            filesystem().rm([_plain(uris.join(uri, name)) for name in names])


def put_files(folder: Path, uri: str, files: dict[str, dict[str, Any]]) -> None:
    """Upload files of a folder side by side; what an interrupted upload left there with equal content is kept.

    Args:
        folder: The local folder.
        uri: Where they go.
        files: Name below both -> {"size": bytes, "sha256": hex}; the digest is kept with the object.
    """
    there = {found.name: found.size for found in listing(uri)}

    def put(name: str) -> None:
        place, wanted = uris.join(uri, name), files[name]
        if there.get(name) == wanted["size"] and _digest(place) == wanted[_SHA256]:
            return
        with answering(place):
            part = max(_PART, -(-wanted["size"] // _MOST_PARTS))
            metadata = {_SHA256: wanted[_SHA256]}
            filesystem().put_file(str(folder / name), _plain(place), chunksize=part, Metadata=metadata)

    _each(put, sorted(files))


def get_files(uri: str, names: Sequence[str], folder: Path) -> None:
    """Download objects below a URI into a folder, side by side; FileNotFoundError where one is missing."""

    def get(name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        place = uris.join(uri, name)
        with answering(place):
            filesystem().get_file(_plain(place), str(target))

    _each(get, names)


def look(uri: str) -> Seen | None:
    """Return an object with its ETag and its age; None where there is none."""
    try:
        with answering(uri):
            content, answer = _get(uri)
    except FileNotFoundError:
        return None
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return Seen(content, str(answer["ETag"]), max((now - answer["LastModified"]).total_seconds(), 0.0))


def put_if(uri: str, content: bytes, etag: str | None) -> str | None:
    """Write a small object only if it is still the one with this ETag (None: only if there is none).

    Returns:
        The new ETag; None where another writer was faster.
    """
    bucket, key = uris.split_remote(uri)
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    with answering(uri):
        try:
            answer = filesystem().call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)
        except OSError as error:
            if _error_code(error) not in _LOST:
                raise
            return None
    return str(answer["ETag"])


def _error_code(error: BaseException) -> str:
    answer = getattr(error.__cause__, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def _digest(uri: str) -> str | None:
    bucket, key = uris.split_remote(uri)
    try:
        with answering(uri):
            found = filesystem().call_s3("head_object", Bucket=bucket, Key=key)
    except FileNotFoundError:
        return None
    return str(found.get("Metadata", {}).get(_SHA256)) or None


def _plain(uri: str) -> str:
    bucket, key = uris.split_remote(uri)
    return f"{bucket}/{key}"


def _each(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    workers = min(_AT_ONCE, len(items))
    if workers < 2:
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(workers)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure nothing more is begun
