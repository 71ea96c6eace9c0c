"""Fuzzed raw files: nothing but named errors, and of a file that can be read no row is lost uncounted."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gr_core.errors import DaybreakError
from gr_core.lake import rawfile
from gr_core.lake.source import preflight
from tests.feeds import DAY, NOON, make_config, ms, read, rows

TYPES = {"id": "string", **dict.fromkeys(["uid", "item", "ts"], "int64"), "clicked": "int32", "liked": "int32"}
FORMS = ["parquet", "csv", "csv.gz", "ndjson", "ndjson.gz"]
FRAME = rows(*({"id": f"e{n % 7}", "uid": n % 3 or None, "ts": ms(NOON) + n * 1000} for n in range(20)), uid=pl.Int64)
LIMITS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def content(form: str) -> bytes:
    """Return a good file of 20 rows, three of them without a user."""
    if form == "parquet":
        stream = io.BytesIO()
        FRAME.write_parquet(stream, compression="uncompressed")
        return stream.getvalue()
    text = (FRAME.write_csv() if form.startswith("csv") else FRAME.write_ndjson()).encode()
    return gzip.compress(text, mtime=0) if form.endswith(".gz") else text


@st.composite
def damaged(draw: st.DrawFn, form: str) -> bytes:
    """Draw a damaged file: cut short, bytes flipped, a piece left out, doubled or replaced, or no such file at all."""
    good = content(form)
    inner = gzip.decompress(good) if form.endswith(".gz") and draw(st.booleans()) else None
    data = bytearray(good if inner is None else inner)
    kinds = st.sampled_from(["cut", "flip", "drop", "double", "replace", "random"])
    for kind in draw(st.lists(kinds, min_size=1, max_size=3)):
        if kind == "random":
            data = bytearray(draw(st.binary(max_size=200)))
            continue
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), start + draw(st.integers(1, 40)))
        match kind:
            case "cut":
                data = data[:start]
            case "flip":
                data[start:end] = bytes(byte ^ draw(st.integers(1, 255)) for byte in data[start : min(end, start + 3)])
            case "drop":
                del data[start:end]
            case "double":
                data[start:start] = data[start:end]
            case "replace":
                data[start:end] = draw(
                    st.sampled_from([b"\n", b'"', b",", b"{", b"}", b"\x00", b"\xff", b"\r", b"\\", b"NaN"])
                )
    return bytes(data) if inner is None else gzip.compress(bytes(data), mtime=0)


def write(folder: Path, form: str, data: bytes) -> Path:
    path = folder / f"dt={DAY}" / f"a.{form}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def config_for(folder: Path, form: str) -> Any:
    kind = form.removesuffix(".gz")
    types = {} if kind == "parquet" else TYPES
    return make_config(folder, {"path": "dt={date}/*", "format": kind, "types": types})


def survives(work: Callable[[], Any]) -> Any:
    """Return what the work returns, or None where it raised an error of ours; every other error fails the test."""
    try:
        return work()
    except DaybreakError:
        return None


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_a_named_error_or_counted_rows(tmp_path: Path, form: str) -> None:
    """The check before the night and the contract alike; read = events + duplicates + quarantined."""

    @LIMITS
    @given(damaged(form))
    def try_it(data: bytes) -> None:
        path = write(tmp_path, form, data)
        config = config_for(tmp_path, form)
        survives(lambda: preflight(config, DAY, bootstrap=False))
        survives(lambda: rawfile.column_names(str(path), config.source.feeds[0].format))
        survives(lambda: rawfile.count_rows(str(path), config.source.feeds[0].format, len(data)))
        batch = survives(lambda: read(config))
        if batch is not None:
            assert batch.read == batch.events.height + batch.duplicates + batch.quarantine.height
            assert batch.quarantine["row"].null_count() == 0
            assert records(form, data) in (batch.read, None)

    try_it()


def records(form: str, data: bytes) -> int | None:
    """Count the records of a file by other means than the reader's; None where the standard library cannot."""
    if form == "parquet":
        return int(pl.read_parquet(io.BytesIO(data)).height)
    text = (gzip.decompress(data) if form.endswith(".gz") else data).decode("utf-8", "surrogateescape")
    if form.startswith("ndjson"):
        return sum(1 for line in text.split("\n") if line.strip())
    # blank lines before the header are no records
    lines = text.lstrip("\n").removesuffix("\n").split("\n")
    try:
        return sum(1 for _ in csv.reader(line + "\n" for line in lines)) - 1
    except csv.Error:
        return None


@pytest.mark.parametrize("form", FORMS)
def test_the_undamaged_file_is_read_whole(tmp_path: Path, form: str) -> None:
    """Seven events, the rest repeats and rows without a user."""
    write(tmp_path, form, content(form))
    batch = read(config_for(tmp_path, form))

    assert (batch.read, batch.events.height, batch.reasons) == (20, 7, {"null_user": 7})
