"""The store on S3: whole or not at all, never stale, and every refusal by its name."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gr_core import environment
from gr_core.errors import ConfigError, DaybreakError, FormatError, StoreUnavailable, UsageError
from gr_core.lake import folders, remote, store
from gr_core.lake.journal import Journal
from tests.s3 import KEY_ID, SECRET, TOKEN, bucket, point_at, refusing, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]


def write(uri: str, **files: str) -> None:
    """Write a directory of text files."""
    with store.directory(uri) as path:
        for name, text in files.items():
            (path / name).write_text(text)


def names(uri: str) -> list[str]:
    """Return what lies below a URI."""
    return [one.name for one in store.listing(uri)]


def write_half(uri: str) -> None:
    """Fail after the first file."""
    with store.directory(uri) as path:
        (path / "b").write_text("new")
        raise RuntimeError("half way")


class Failing:
    """Fails the n-th upload of a file, and counts all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        self.place, self.sent = place, []
        client = remote.filesystem()
        self._real = client.put_file
        monkeypatch.setattr(client, "put_file", self)
        monkeypatch.setattr(remote, "_AT_ONCE", 1)

    def __call__(self, local: str, target: str, **more: Any) -> None:
        """Upload, or break off."""
        self.sent.append(target.rpartition("/")[2])
        if len(self.sent) == self.place:
            raise ConnectionResetError("connection reset by peer")
        self._real(local, target, **more)


def test_files_and_parts_of_files(bucket: str) -> None:
    """What was written is read: whole, in parts, beyond the end, and several at once; a missing object says so."""
    uri = f"{bucket}/a/b.bin"
    store.write_bytes(uri, b"0123456789")
    store.write_bytes(f"{bucket}/a/empty", b"")

    assert store.read_bytes(uri) == b"0123456789"
    assert store.read_bytes(f"{bucket}/a/empty") == b""
    assert store.read_all([uri, f"{bucket}/a/empty"]) == [b"0123456789", b""]
    assert store.read_range(uri, 2, 3) == b"234"
    assert store.read_ranges(uri, [(8, 5), (0, 1), (4, 0), (10, 2)]) == [b"89", b"0", b"", b""]
    assert [store.exists(f"{bucket}/{name}") for name in ("a", "a/b.bin", "a/b", "b", "")] == [
        True,
        True,
        False,
        False,
        True,
    ]
    with pytest.raises(FileNotFoundError):
        store.read_bytes(f"{bucket}/a/none")
    store.remove(uri)
    store.remove(uri)
    assert names(bucket) == ["a/empty"]


def test_a_large_object_is_read_in_parts_of_one_version(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object overwritten between two parts is read again, never mixed."""
    uri = f"{bucket}/large"
    monkeypatch.setattr(remote, "_PART", 4)
    store.write_bytes(uri, b"a" * 10)
    assert store.read_bytes(uri) == b"a" * 10
    real, overwritten = remote._get, []

    def get(place: str, **conditions: str) -> tuple[bytes, dict[str, Any]]:
        found = real(place, **conditions)
        if not overwritten:
            overwritten.append(True)
            store.write_bytes(uri, b"b" * 9)
        return found

    monkeypatch.setattr(remote, "_get", get)

    assert store.read_bytes(uri) == b"b" * 9


def test_a_directory_is_downloaded_once(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was made a folder's copy is there already, elsewhere it is downloaded once; a damaged copy again."""
    uri, fetched, real = f"{bucket}/packs/train", [], remote.get_files
    monkeypatch.setattr(remote, "get_files", lambda *told: fetched.append(told[0]) or real(*told))
    write(uri, a="text", b="")
    assert store.local_copy(uri).name == "train"
    assert not fetched

    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "another machine"))
    copy = store.local_copy(uri)
    assert store.local_copy(f"{uri}/") == copy
    assert {path.name: path.read_text() for path in copy.iterdir()} == {"a": "text", "b": ""}
    assert len(fetched) == 1
    (copy / "a").write_text("te")
    assert (store.local_copy(uri) / "a").read_text() == "text"


def test_an_overwritten_directory_is_fetched_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine overwrites a folder: the copy here is fetched again, with nothing of the old one in it."""
    uri = f"{bucket}/packs/train"
    write(uri, a="old", gone="x")
    store.local_copy(uri)
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "another machine"))
    write(uri, a="new")
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "state"))

    copy = store.local_copy(uri)

    assert {path.name: path.read_text() for path in copy.iterdir()} == {"a": "new"}
    assert names(uri) == [folders.COMPLETE, "a"]


def test_an_exception_publishes_nothing(bucket: str) -> None:
    """Raising after the first of three files leaves the old folder as it was (case C1); a rerun has all of the new."""
    uri = f"{bucket}/dt=1"
    write(uri, a="old")

    with pytest.raises(RuntimeError, match="half way"):
        write_half(uri)

    assert names(uri) == [folders.COMPLETE, "a"]
    assert (store.local_copy(uri) / "a").read_text() == "old"
    write(uri, a="1", b="2", c="3")
    assert sorted(path.name for path in store.local_copy(uri).iterdir()) == ["a", "b", "c"]


def test_an_upload_that_broke_off_is_no_directory_and_is_taken_up(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three files fails: no folder is there, old or new; the next try sends only what is missing."""
    uri, folder = f"{bucket}/checkpoint", tmp_path / "made"
    write(uri, a="old", b="old")
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text(f"new {name}")
    failing = Failing(monkeypatch, 2)

    with pytest.raises(StoreUnavailable, match=r"checkpoint/b did not answer .*reset by peer"):
        store.upload(folder, uri)

    assert not store.is_complete(uri)
    with pytest.raises(FileNotFoundError, match="not uploaded whole"):
        store.local_copy(uri)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
    store.upload(folder, uri)
    assert failing.sent == ["a", "b", "b", "c"]
    assert {path.name: path.read_text() for path in store.local_copy(uri).iterdir()} == {n: f"new {n}" for n in "abc"}


def test_a_reader_whom_an_upload_overtakes_mixes_nothing(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwritten between its list of files and their bytes, a folder is read again; damaged objects are named."""
    uri = f"{bucket}/x"
    write(uri, a="old", b="old")
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "reader"))
    real, overtaken = remote.get_files, []

    def get_files(*told: Any) -> None:
        if not overtaken:
            overtaken.append(True)
            write(uri, a="new", b="new")
            monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "reader again"))
        real(*told)

    monkeypatch.setattr(remote, "get_files", get_files)
    assert {path.read_text() for path in store.local_copy(uri).iterdir()} == {"new"}

    store.write_bytes(f"{uri}/a", b"damaged")
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "third"))
    with pytest.raises(FormatError, match="differ from _COMPLETE"):
        store.local_copy(uri)


def test_a_failed_part_leaves_no_object(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a large file fails for good: no object, no upload that hangs open; the next try sends it whole."""
    monkeypatch.setattr(remote, "_PART", 5 * 2**20)
    uri, folder = f"{bucket}/packs", tmp_path / "packs"
    folder.mkdir()
    (folder / "pack.arrow").write_bytes(bytes(range(256)) * (11 * 2**12))
    client = remote.filesystem()
    real, parts = client._call_s3, []

    async def call(method: str, *told: Any, **more: Any) -> Any:
        if method == "upload_part":
            parts.append(more["PartNumber"])
            if parts.count(2) == 1 and more["PartNumber"] == 2:
                raise ConnectionResetError("connection reset by peer")
        return await real(method, *told, **more)

    monkeypatch.setattr(client, "_call_s3", call)

    with pytest.raises(StoreUnavailable, match="reset by peer"):
        store.upload(folder, uri)
    assert names(uri) == []
    assert not client.call_s3("list_multipart_uploads", Bucket=bucket.removeprefix("s3://")).get("Uploads")

    store.upload(folder, uri)
    monkeypatch.setenv("DAYBREAK_STATE", str(tmp_path / "another machine"))
    assert (store.local_copy(uri) / "pack.arrow").read_bytes() == bytes(range(256)) * (11 * 2**12)
    assert sorted(parts[-3:]) == [1, 2, 3]


def test_listings_are_never_stale(bucket: str) -> None:
    """A file that another client adds or removes is seen at once, by listing and by pattern (case C3)."""
    import s3fs

    other = s3fs.S3FileSystem(skip_instance_cache=True)
    store.write_bytes(f"{bucket}/log/dt=1/a.parquet", b"1")
    assert [one.name for one in store.matching(bucket, "log/dt=1/*.parquet")] == ["log/dt=1/a.parquet"]

    other.pipe_file(f"{bucket}/log/dt=1/b.parquet", b"2")
    assert names(f"{bucket}/log") == ["dt=1/a.parquet", "dt=1/b.parquet"]
    assert store.exists(f"{bucket}/log/dt=1/b.parquet")
    other.rm_file(f"{bucket}/log/dt=1/a.parquet")
    assert [one.name for one in store.matching(bucket, "log/dt=1/*.parquet")] == ["log/dt=1/b.parquet"]
    assert not store.exists(f"{bucket}/log/dt=1/a.parquet")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.csv", ["top.csv"]),
        ("a/*.csv", ["a/1.csv"]),
        ("a/**/*.csv", ["a/1.csv", "a/b/2.csv", "a/b/c/3.csv"]),
        ("a/b/2.csv", ["a/b/2.csv"]),
        ("a/?.csv", ["a/1.csv"]),
        ("a/[b]/*", ["a/b/2.csv"]),
        ("nothing/*", []),
    ],
)
def test_a_pattern_matches_as_it_does_on_a_disk(bucket: str, tmp_path: Path, pattern: str, wanted: list[str]) -> None:
    """Patterns mean the same on S3 and on a disk; directory markers are no files."""
    for name in ("top.csv", "a/1.csv", "a/b/2.csv", "a/b/c/3.csv", "ab/4.csv"):
        store.write_bytes(f"{bucket}/in/{name}", b"x")
        store.write_bytes(str(tmp_path / "in" / name), b"x")
    remote.filesystem().call_s3("put_object", Bucket=bucket.removeprefix("s3://"), Key="in/a/b/", Body=b"")

    assert [one.name for one in store.matching(f"{bucket}/in", pattern)] == wanted
    base = tmp_path / "in"
    assert sorted(p.relative_to(base).as_posix() for p in base.glob(pattern) if p.is_file()) == wanted


def test_a_removed_tree_is_gone_here_too(bucket: str) -> None:
    """Removing a tree removes its objects and this machine's copies of every folder in it."""
    write(f"{bucket}/nights/1/packs", a="x")
    write(f"{bucket}/nights/2/packs", a="y")
    kept = store.local_copy(f"{bucket}/nights/2/packs")
    gone = store.local_copy(f"{bucket}/nights/1/packs")

    store.remove_tree(f"{bucket}/nights/1")

    assert names(f"{bucket}/nights") == [f"2/packs/{folders.COMPLETE}", "2/packs/a"]
    assert not gone.exists()
    assert kept.exists()


def test_old_copies_make_room(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the copies used longest ago are given up, but none that this process was given."""
    monkeypatch.setenv("DAYBREAK_CACHE_GIB", "0.00001")
    for number in range(3):
        write(f"{bucket}/{number}", a=str(number) * 9000)
    mine = store.local_copy(f"{bucket}/0")
    folders._in_use.clear()
    write(f"{bucket}/3", a="3" * 9000)

    assert len(list(environment.cache_directory().glob("*/*/?"))) == 1
    assert not mine.exists()
    assert (store.local_copy(f"{bucket}/0") / "a").read_text() == "0" * 9000
    assert (store.local_copy(f"{bucket}/3") / "a").read_text() == "3" * 9000


def _read_in_child(uri: str, told: Any) -> None:
    told.put(store.read_bytes(uri))


def test_a_forked_child_reads(bucket: str) -> None:
    """S3 used before a fork does not hang the child, as it does with s3fs' own cached clients (case C9)."""
    uri = f"{bucket}/x"
    store.write_bytes(uri, b"x")
    assert names(bucket) == ["x"]
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    children = [context.Process(target=_read_in_child, args=(uri, told)) for _ in range(2)]
    for child in children:
        child.start()

    assert [told.get(timeout=30) for _ in children] == [b"x", b"x"]
    for child in children:
        child.join(30)


CODES = {
    "ExpiredToken": (400, "the credentials have expired"),
    "InvalidAccessKeyId": (403, "the store does not know the access key id"),
    "AccessDenied": (403, "these credentials may not do this"),
    "SignatureDoesNotMatch": (403, "the secret key does not fit the access key id"),
}
WAYS: dict[str, Callable[[str], Any]] = {
    "read": store.read_bytes,
    "write": lambda uri: store.write_bytes(uri, b"x"),
    "list": store.listing,
    "copy": store.local_copy,
    "journal": lambda uri: Journal(uri).entries(),
    "append": lambda uri: Journal(uri).append("attempt", "n", {}, at_us=1),
}


@pytest.mark.parametrize("code", CODES)
def test_refused_credentials_name_themselves_and_nothing_else(
    code: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every way to the store says which credential problem it is, the bucket and what to do, and never the credential."""
    status, meaning = CODES[code]
    caplog.set_level(logging.INFO)
    with refusing(code, status) as endpoint:
        point_at(endpoint, monkeypatch)
        for way in WAYS.values():
            with pytest.raises(ConfigError, match=rf"bucket shop: {meaning} \({code}\)") as caught:
                way("s3://shop/home/x")
            shown = "".join(traceback.format_exception(caught.value)) + caplog.text
            assert not [word for word in (KEY_ID, SECRET, TOKEN) if word in shown]
            assert "AWS_" in shown or "s3:GetObject" in shown


def test_a_missing_bucket_and_a_dead_endpoint_are_named_in_time(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing bucket is an error of the config; a dead endpoint is silence, named well within 30 seconds."""
    point_at(s3_endpoint, monkeypatch)
    for way in WAYS.values():
        with pytest.raises(ConfigError, match=r"bucket nowhere: there is no such bucket .*--home"):
            way("s3://nowhere/home/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for way in (WAYS["read"], WAYS["append"]):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"s3://shop/home/x did not answer .*check that AWS_ENDPOINT_URL"):
            way("s3://shop/home/x")
        assert time.monotonic() - began < 30


def test_credentials_in_a_uri_are_refused_unseen() -> None:
    """A URI with a key in it would end in journals and logs; other schemes are named."""
    with pytest.raises(UsageError, match="may not contain credentials") as caught:
        environment.home_uri("x", f"s3://{KEY_ID}:{SECRET}@bucket/x")
    assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match=r"gs://b/x: only local paths and s3://"):
        environment.home_uri("x", "gs://b/x")
    with pytest.raises(UsageError, match="needs a bucket"):
        environment.home_uri("x", "s3://")


def test_other_errors_pass_as_they_are() -> None:
    """Faults of ours and of the local disk are not taken for the store's, nor is anything where the home is local."""
    for error in (ValueError("x"), OSError(28, "No space left on device", "/tmp/x"), StoreUnavailable("x")):
        assert store.named("s3://b/x", error) is None
    assert store.named("/local", ConnectionResetError("x")) is None
    assert isinstance(store.named("s3://b/x", ConnectionResetError("x")), DaybreakError)
    assert json.loads(json.dumps(environment.storage_options("/local"))) is None
