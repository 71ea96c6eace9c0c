"""Exact id -> row per embedding table, growing along a lineage.

In: id counts of the commits that are new since the parent, and the parent's vocabulary. Out: a `Vocabulary` in which no
row ever moves. Rows of a table: 0 pad, 1 unknown (a null side feature), then the fallback rows (one, or one per type of
`fallback_by`), then ids in the order of their admission. Ids without a row map to their fallback row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from gr_core.data.ragged import FIRST_CODE, UNKNOWN_CODE
from gr_core.errors import FormatError
from gr_core.formats import RETRAIN, check_format
from gr_core.schema import FIRST_FALLBACK_ROW, PAD_ROW, UNKNOWN_ROW

logger = logging.getLogger(__name__)

VOCABULARY_FORMAT = 2
VOCABULARY_FILE = "vocabulary.json"
CANDIDATE = -1
COUNTS = pl.Schema({"id": pl.String, "type": pl.String, "count": pl.Int64})
ROWS = pl.Schema({"id": pl.String, "row": pl.Int32, "fallback": pl.Int32, "count": pl.Int64})


class AdmissionRule(Protocol):
    """What `grow` reads of a table's config (gr_core.config.VocabularyTable)."""

    @property
    def min_count(self) -> int:
        """Events of trained users an id needs before it gets a row."""

    @property
    def fallback_by(self) -> str | None:
        """Side feature by whose value fallback rows are kept apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyTable:
    """The ids of one embedding table."""

    ids: pl.DataFrame
    """id, row (-1: a candidate without a row yet), fallback (its fallback row), count; rows first, then by id."""
    rows: int
    """Rows in use, the reserved ones included."""
    capacity: int
    """Rows to allocate: a power of two, at least a fifth of it free."""
    fallback_types: tuple[str, ...] = ()
    """Types with a fallback row each, from row 2 on; empty: one fallback row for all."""
    fallback_by: str | None = None
    """The side feature that holds an id's type."""

    @property
    def fallbacks(self) -> int:
        """Number of fallback rows."""
        return max(1, len(self.fallback_types))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """All tables, versioned by content."""

    version: str
    tables: dict[str, VocabularyTable]


def dictionary(rows: pl.DataFrame, name: str, by: str | None = None) -> tuple[npt.NDArray[np.int32], pl.DataFrame]:
    """Number the distinct ids of a feature, so that text is looked at once an id and not once a token.

    Args:
        rows: Rows of the event table, those of one bucket for example.
        name: The feature's column.
        by: The column with its ids' types (`fallback_by`); None: no types. An id of two types has two codes.

    Returns:
        The code of each row, [E]: ragged.UNKNOWN_CODE for null, else FIRST_CODE plus the place in the frame; the frame
        of id and type (null without), in the order of first appearance.
    """
    codes, ids = _numbered(rows[name])
    types = pl.Series([], dtype=pl.String).extend_constant(None, len(ids))
    if by is not None:
        of_row, kinds = _numbered(rows[by])
        pairs = pa.array(codes.astype(np.int64) * (len(kinds) + 1) + of_row + 1, mask=codes < 0).dictionary_encode()
        codes, distinct = _dense(pairs), pairs.dictionary.to_numpy()
        kind = pl.Series(distinct % (len(kinds) + 1) - 1)
        ids, types = ids.gather(distinct // (len(kinds) + 1)), kinds.gather(kind.set(kind < 0, None))
    codes = np.where(codes < 0, UNKNOWN_CODE, codes + FIRST_CODE).astype(np.int32, copy=False)
    return codes, pl.DataFrame({"id": ids, "type": types}, schema={"id": pl.String, "type": pl.String})


def _numbered(texts: pl.Series) -> tuple[npt.NDArray[np.int32], pl.Series]:
    """Return the place of each text among the distinct ones in the order of first appearance, -1 for null; and these."""
    encoded = texts.cast(pl.String).to_arrow().dictionary_encode()
    return _dense(encoded), pl.Series(encoded.dictionary, dtype=pl.String)


def _dense(encoded: Any) -> npt.NDArray[np.int32]:
    places: npt.NDArray[np.int32] = encoded.indices.fill_null(-1).to_numpy()
    return places


def merge_counts(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Sum the counts of one table over buckets; ids that nobody counted are left out, the parts' order changes nothing."""
    counts = pl.concat([COUNTS.to_frame(), *parts]).filter(pl.col("count") > 0)
    return counts.group_by("id", "type").agg(pl.col("count").sum()).sort("id", "type")


def grow(
    parent: Vocabulary | None, counts: Mapping[str, pl.DataFrame], rules: Mapping[str, AdmissionRule]
) -> Vocabulary:
    """Add counts to the parent's and admit the ids that now reach `min_count`.

    Existing rows never move; new ones follow by falling count, then id. Types of fallback rows are fixed at the
    lineage's root; an id's fallback row is fixed when the id is first counted (its most frequent type then).

    Args:
        parent: The parent's vocabulary; None at a lineage's root.
        counts: Table -> counts of what the parent has not counted, as `merge_counts` returns them.
        rules: Admission by table, for every table of `counts`.

    Returns:
        The grown vocabulary; equal content has an equal version.
    """
    tables = {}
    for name, frame in counts.items():
        old = parent.tables.get(name) if parent is not None else None
        tables[name] = _grow_table(old, frame, rules[name])
        logger.info("vocabulary %s: %d entries, capacity %d", name, tables[name].rows, tables[name].capacity)
    return Vocabulary(version=_version(tables), tables=tables)


def _grow_table(old: VocabularyTable | None, counts: pl.DataFrame, rule: AdmissionRule) -> VocabularyTable:
    if old is None:
        types = tuple(counts["type"].drop_nulls().unique().sort()) if rule.fallback_by else ()
        start = FIRST_FALLBACK_ROW + max(1, len(types))
        old = VocabularyTable(
            ids=ROWS.to_frame(), rows=start, capacity=0, fallback_types=types, fallback_by=rule.fallback_by
        )
    fallback_of = _fallback_rows(old.fallback_types)
    fresh = (
        counts.sort("id", pl.col("type").is_null(), pl.col("count"), "type", descending=[False, False, True, False])
        .group_by("id", maintain_order=True)
        .agg(pl.col("type").first(), pl.col("count").sum())
        .select("id", _fallback(pl.col("type"), fallback_of).alias("fallback"), pl.col("count").alias("more"))
    )
    merged = (
        old.ids.join(fresh, on="id", how="full", coalesce=True, suffix="_new")
        .with_columns(
            row=pl.col("row").fill_null(CANDIDATE),
            fallback=pl.coalesce("fallback", "fallback_new"),
            count=pl.col("count").fill_null(0) + pl.col("more").fill_null(0),
        )
        .select(ROWS.names())
        .cast(ROWS)
    )
    admitted = merged.filter((pl.col("row") == CANDIDATE) & (pl.col("count") >= rule.min_count))
    admitted = admitted.sort("count", "id", descending=[True, False]).with_columns(
        row=pl.int_range(old.rows, old.rows + pl.len(), dtype=pl.Int32)
    )
    rows = old.rows + len(admitted)
    rest = merged.filter((pl.col("row") != CANDIDATE) | (pl.col("count") < rule.min_count))
    ids = pl.concat([rest, admitted]).sort(pl.col("row") == CANDIDATE, "row", "id")
    return VocabularyTable(
        ids=ids,
        rows=rows,
        capacity=max(old.capacity, capacity_for(rows)),
        fallback_types=old.fallback_types,
        fallback_by=old.fallback_by,
    )


def capacity_for(rows: int) -> int:
    """Return the smallest power of two of which `rows` fill at most four fifths."""
    return 1 << (-(-5 * rows // 4) - 1).bit_length()


def _fallback_rows(types: Sequence[str]) -> dict[str, int]:
    return {kind: FIRST_FALLBACK_ROW + i for i, kind in enumerate(types)}


def _fallback(kind: pl.Expr, rows: Mapping[str, int]) -> pl.Expr:
    """Return the fallback row of a type; the first one for null and for types that the root did not know."""
    if not rows:
        return kind.is_null().cast(pl.Int32) * 0 + FIRST_FALLBACK_ROW
    return kind.replace_strict(
        pl.Series(list(rows), dtype=pl.String),
        pl.Series(list(rows.values()), dtype=pl.Int32),
        default=FIRST_FALLBACK_ROW,
        return_dtype=pl.Int32,
    )


def rows_of(ids: pl.DataFrame, table: VocabularyTable) -> npt.NDArray[np.int32]:
    """Return the embedding row of every code of a dictionary.

    An id without a row has its fallback row; one that was never counted takes the fallback of its type, where that is
    given, else the first one.

    Args:
        ids: id and type in code order, as `dictionary` returns them; D of them.
        table: Ids and rows.

    Returns:
        [FIRST_CODE + D]: the pad row, the unknown row, then those of the ids.
    """
    unseen = _fallback(pl.col("type"), _fallback_rows(table.fallback_types))
    known = pl.lit(None, pl.Int32)
    asked = table.ids.filter(pl.col("id").is_in(ids["id"].implode()))  # the table may be far larger than a bucket's ids
    if len(asked):
        row = pl.when(pl.col("row") == CANDIDATE).then("fallback").otherwise("row")
        known = pl.col("id").replace_strict(
            asked["id"], asked.select(row).to_series(), default=None, return_dtype=pl.Int32
        )
    found = ids.select(pl.coalesce(known, unseen)).to_series().to_numpy()
    return np.concatenate([np.asarray([PAD_ROW, UNKNOWN_ROW], np.int32), found])


def _version(tables: Mapping[str, VocabularyTable]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tables):
        table = tables[name]
        described = _described(table)
        digest.update(json.dumps([name, described], sort_keys=True).encode())
        lengths = table.ids["id"].str.len_bytes().to_numpy()
        digest.update(lengths.astype("<i8").tobytes())
        digest.update(table.ids["id"].str.join().item().encode())
        for column in ("row", "fallback", "count"):
            digest.update(table.ids[column].to_numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _described(table: VocabularyTable) -> dict[str, Any]:
    return {
        "rows": table.rows,
        "capacity": table.capacity,
        "fallbacks": table.fallbacks,
        "fallback_types": list(table.fallback_types),
        "fallback_by": table.fallback_by,
    }


def save(vocabulary: Vocabulary, folder: Path) -> None:
    """Write <table>.arrow (uncompressed Arrow IPC file) for every table, then vocabulary.json.

    Args:
        vocabulary: What to write.
        folder: Directory, made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in vocabulary.tables.items():
        table.ids.write_ipc(folder / f"{name}.arrow", compression="uncompressed", compat_level=pl.CompatLevel.oldest())
    value = {
        "format": VOCABULARY_FORMAT,
        "version": vocabulary.version,
        "tables": {name: _described(table) for name, table in vocabulary.tables.items()},
    }
    (folder / VOCABULARY_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        FormatError: No vocabulary, another format number, or content that does not match its version.
    """
    path = folder / VOCABULARY_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        remedy = f"{RETRAIN}, or go on with the release that wrote it"
        check_format("vocabulary", str(path), value.get("format"), VOCABULARY_FORMAT, remedy)
        tables = {
            name: VocabularyTable(
                ids=pl.read_ipc(folder / f"{name}.arrow"),
                rows=table["rows"],
                capacity=table["capacity"],
                fallback_types=tuple(table["fallback_types"]),
                fallback_by=table["fallback_by"],
            )
            for name, table in value["tables"].items()
        }
        version = value["version"]
    except (OSError, KeyError, ValueError, pl.exceptions.PolarsError) as error:
        raise FormatError(f"{folder} holds no readable vocabulary: {error}", where=str(folder)) from error
    if _version(tables) != version:
        raise FormatError(
            f"the tables in {folder} must match version {version}, got {_version(tables)}; restore the folder",
            where=str(folder),
        )
    return Vocabulary(version=version, tables=tables)
