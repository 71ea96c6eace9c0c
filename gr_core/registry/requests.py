"""Files of requests and of scores: Parquet or JSON lines, read a piece at a time, each row checked, written whole.

A request's form stands in gr_core.registry.scorer. What is wrong with a row is said with its file, row (from 1) and
column, before anything of it is scored.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gr_core.errors import DataContractError, UsageError
from gr_core.lake import store

PIECE = 1024  # rows that are read and scored at a time
SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
REQUIRED = ("shown_at", "candidates")
PLAIN = ("request_id", "user_id", "shown_at", "history", "candidates")
ENTRY = ("item_id", "shown_at", "visible_at", "actions", "known")
EARLIEST_US, LATEST_US = 946_684_800_000_000, 9_223_372_035_000_000  # 2000 to 2262, as the contract of raw rows has it

Numbered = tuple[int, dict[str, Any]]
"""A row's number in its file, from 1, and its values."""


def form_of(uri: str, option: str) -> str:
    """Return "parquet" or "jsonl" by a file's suffix; UsageError for any other."""
    found = next((form for suffix, form in SUFFIXES.items() if uri.lower().endswith(suffix)), None)
    if found is None:
        raise UsageError(f"{option} takes a file that ends in {', '.join(SUFFIXES)}, got {uri!r}", where=option)
    return found


def bad_row(uri: str, row: int, column: str, what: str) -> DataContractError:
    """Return the error that names a row's file, number and column."""
    return DataContractError(f"{uri}: row {row}, column {column}: {what}", where=f"{uri}:{row}:{column}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFile:
    """A file of requests."""

    uri: str
    form: str
    content: bytes | None = None
    """Of a file on an object store, which is fetched once; None: local."""

    @classmethod
    def at(cls, uri: str) -> RequestFile:
        """Return the file at a local path or s3:// URI; UsageError where there is none, or its suffix says nothing."""
        form = form_of(uri, "--input")
        if not store.exists(uri):
            raise UsageError(f"--input {uri} does not exist; name a file of requests", where="input")
        if store.is_local(uri) and store.local_path(uri).is_dir():
            raise UsageError(f"--input {uri} is a folder; name a file of requests", where="input")
        return cls(uri=uri, form=form, content=None if store.is_local(uri) else store.read_bytes(uri))

    def total(self) -> int | None:
        """Return the number of rows where the file tells it without being read."""
        return int(self._parquet().metadata.num_rows) if self.form == "parquet" else None

    def id_type(self) -> pa.DataType | None:
        """Return the type of request_id; None where the file has no types, or no such column."""
        if self.form != "parquet":
            return None
        schema = self._parquet().schema_arrow
        return schema.field("request_id").type if "request_id" in schema.names else None

    def pieces(self) -> Iterator[list[Numbered]]:
        """Yield the rows, PIECE at a time, in order.

        Raises:
            DataContractError: Not a readable file of this form, or a required column is missing.
        """
        if self.form == "parquet":
            yield from self._rows_of_parquet()
        else:
            yield from self._rows_of_lines()

    def _open(self) -> Any:
        return pa.OSFile(str(store.local_path(self.uri))) if self.content is None else pa.BufferReader(self.content)

    def _parquet(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._open())
        except (pa.ArrowException, OSError) as error:
            raise DataContractError(f"{self.uri} is no readable Parquet file: {error}", where=self.uri) from error

    def _rows_of_parquet(self) -> Iterator[list[Numbered]]:
        file, row = self._parquet(), 0
        missing = [name for name in REQUIRED if name not in file.schema_arrow.names]
        if missing:
            raise DataContractError(
                f"{self.uri} has no column {missing[0]}; it has {file.schema_arrow.names}",
                where=f"{self.uri}:{missing[0]}",
            )
        twice = _repeated(file.schema_arrow)
        if twice is not None:
            where = f"{self.uri}:{twice}"
            raise DataContractError(f"{self.uri} has column {twice} twice; give it once", where=where)
        try:
            for batch in file.iter_batches(batch_size=PIECE, use_threads=False):
                yield list(enumerate(batch.to_pylist(), row + 1))
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataContractError(f"{self.uri} is damaged after row {row}: {error}", where=self.uri) from error

    def _rows_of_lines(self) -> Iterator[list[Numbered]]:
        piece: list[Numbered] = []
        with io.TextIOWrapper(self._open(), encoding="utf-8", newline="\n") as lines:
            number = 0
            while True:
                number += 1
                try:
                    line = lines.readline()
                except UnicodeDecodeError as error:
                    raise bad_row(self.uri, number, "*", f"is not UTF-8 ({error}); write the file as UTF-8") from error
                if not line:
                    break
                if line.strip():
                    piece.append((number, self._parsed(line, number)))
                if len(piece) == PIECE:
                    yield piece
                    piece = []
        if piece:
            yield piece

    def _parsed(self, line: str, row: int) -> dict[str, Any]:
        try:
            value = json.loads(line, object_pairs_hook=_once)
        except _Twice as error:
            raise bad_row(self.uri, row, str(error), "is given twice; give one value") from error
        except (ValueError, RecursionError) as error:
            raise bad_row(self.uri, row, "*", f"is no JSON ({error}); write one object a line") from error
        if not isinstance(value, dict):
            raise bad_row(self.uri, row, "*", f"is {type(value).__name__} and no object; write one object a line")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What a model reads of a request; any other column would be passed over, such as a misspelt feature."""

    request: frozenset[str]
    candidate: frozenset[str]
    """Keys of a candidate that is a struct."""
    entry: frozenset[str]
    """Keys of an entry of the history."""

    @classmethod
    def of(cls, item_features: Sequence[str], context_features: Sequence[str]) -> Columns:
        """Return the columns of a model with these features, item_id among the first."""
        sides = [f"candidate_{name}" for name in item_features if name != "item_id"]
        return cls(
            request=frozenset([*PLAIN, *sides, *context_features]),
            candidate=frozenset(["item_id", *item_features]),
            entry=frozenset([*ENTRY, *item_features]),
        )


def check(uri: str, row: int, request: Mapping[str, Any], item_features: Sequence[str], columns: Columns) -> None:
    """Refuse a request that cannot be scored.

    Args:
        uri: Its file.
        row: Its number there.
        request: Its values.
        item_features: The model's item features, item_id among them.
        columns: All that the model reads.

    Raises:
        DataContractError: Names file, row and column, and what the value must be.
    """
    _check_known(uri, row, "", request, columns.request)
    trouble = _moment(request.get("shown_at"))
    if trouble is not None:
        raise bad_row(uri, row, "shown_at", f"{trouble}; give the time (UTC) at which the candidates are shown")
    user = request.get("user_id")
    if user is not None and not _is_id(user):
        raise bad_row(uri, row, "user_id", f"must be a user id, text or integer, or null, got {_shown(user)}")
    candidates = request.get("candidates")
    if not isinstance(candidates, list):
        raise bad_row(uri, row, "candidates", f"must be a list of item ids, got {_shown(candidates)}")
    for place, one in enumerate(candidates):
        if not _is_id(one.get("item_id") if isinstance(one, dict) else one):
            raise bad_row(uri, row, f"candidates[{place}]", f"must be an item id, text or integer, got {_shown(one)}")
        if isinstance(one, dict):
            _check_known(uri, row, f"candidates[{place}].", one, columns.candidate)
    for name in item_features:
        given = request.get(f"candidate_{name}")
        if given is not None and (not isinstance(given, list) or len(given) != len(candidates)):
            size = f"{len(given)} values" if isinstance(given, list) else _shown(given)
            what = f"must have one value a candidate ({len(candidates)}), got {size}"
            raise bad_row(uri, row, f"candidate_{name}", what)
    history = request.get("history")
    if history is not None and not isinstance(history, list):
        raise bad_row(uri, row, "history", f"must be a list of structs, or null, got {_shown(history)}")
    for place, one in enumerate(history or []):
        _check_entry(uri, row, f"history[{place}]", one)
        _check_known(uri, row, f"history[{place}].", one, columns.entry)


def _check_known(uri: str, row: int, where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = given.keys() - known
    if unknown:
        what = f"is nothing that this model reads; remove it or mend its spelling: it reads {', '.join(sorted(known))}"
        raise bad_row(uri, row, where + min(unknown), what)


def _check_entry(uri: str, row: int, where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise bad_row(uri, row, where, f"must be a struct with item_id and visible_at, got {_shown(entry)}")
    if not _is_id(entry.get("item_id")):
        raise bad_row(uri, row, f"{where}.item_id", f"must be an item id, got {_shown(entry.get('item_id'))}")
    trouble = _moment(entry.get("visible_at"))
    if trouble is not None:
        raise bad_row(uri, row, f"{where}.visible_at", f"{trouble}; give the time from which it was history")
    for name in ("actions", "known"):
        bits = entry.get(name)
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int) or not 0 <= bits < 2**31):
            raise bad_row(uri, row, f"{where}.{name}", f"must be a mask of action bits, got {_shown(bits)}")


def _is_id(value: Any) -> bool:
    whole = isinstance(value, float) and value.is_integer()  # an integer column that had nulls once
    return (isinstance(value, str | int) and not isinstance(value, bool)) or whole


def _moment(value: Any) -> str | None:
    """Return what is wrong with a time; None where it is one."""
    if value is None:
        return "is missing"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return None if EARLIEST_US <= value <= LATEST_US else f"is no time from 2000 on in microseconds: {value}"
    if isinstance(value, datetime):
        return None
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            return f"is no time: {value!r}"
        return None
    return f"must be a timestamp, ISO 8601 text or integer microseconds, got {_shown(value)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Twice(Exception):
    """A key that an object of a JSON line has more than once."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON line; _Twice where a key is repeated, of which a dict would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return found


def _repeated(fields: Iterable[pa.Field]) -> str | None:
    """Return the dotted name of a column, or of a field of its structs, that stands there twice; None where none does."""
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            return str(field.name)
        seen.add(field.name)
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        inner = _repeated(kind.field(n) for n in range(kind.num_fields)) if pa.types.is_struct(kind) else None
        if inner is not None:
            return f"{field.name}.{inner}"
    return None


class ScoreWriter:
    """Writes request_id and the lists of scores, a piece at a time, to an open stream.

    Args:
        stream: Where to.
        form: parquet or jsonl.
        names: scores_<action> of each column of scores.
        id_type: Type of request_id in a Parquet file; None: that of the first piece's values.
    """

    def __init__(self, stream: IO[bytes], form: str, names: Sequence[str], id_type: pa.DataType | None) -> None:
        self._stream, self._form, self._names, self._id_type = stream, form, list(names), id_type
        self._parquet: pq.ParquetWriter | None = None

    def write(self, ids: Sequence[Any], scores: Mapping[str, list[list[float]]]) -> None:
        """Append one piece; pa.ArrowException where an id is of another type than the first ones."""
        if self._form == "jsonl":
            for place, one in enumerate(ids):
                line = {"request_id": one, **{name: scores[name][place] for name in self._names}}
                self._stream.write(json.dumps(line, default=str, allow_nan=False).encode() + b"\n")
            return
        if self._id_type is None:
            kind = pa.array(list(ids)).type
            self._id_type = pa.string() if pa.types.is_null(kind) else kind
        lists = {name: pa.array(scores[name], pa.list_(pa.float32())) for name in self._names}
        table = pa.table({"request_id": pa.array(list(ids), self._id_type), **lists})
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._stream, table.schema)
        self._parquet.write_table(table)

    def close(self) -> None:
        """Write what is left; an empty file of scores has its columns too."""
        if self._form == "parquet" and self._parquet is None:
            self.write([], {name: [] for name in self._names})
        if self._parquet is not None:
            self._parquet.close()
