"""Taking an ingestion back: its rows leave the event table, and what it changed or replaced is as before again.

What was before is read from older versions. Bucket by bucket and file by file, rows keep their order and files their
place; all of it becomes visible as one Delta commit, marked and counted like every one that removes rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import polars as pl
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from gr_core.lake.commits import Commit
from gr_core.lake.events import layout
from gr_core.lake.events.erasure import TOLD, Open, marks
from gr_core.lake.events.writing import Writing, clusters
from gr_core.refs import Ref

logger = logging.getLogger("gr_core.lake.events")

_KEYS = list(layout.KEY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingestion:
    """One of our commits, as far as undoing it goes."""

    number: int
    """Its own number: what it changed is marked by it."""
    delta_version: int
    numbers: frozenset[int]
    """All numbers that it gave: restated days have numbers of their own."""
    replaced: frozenset[int]
    """Numbers that it may have removed rows of, for a restated day that is replaced."""

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """Read it from a commit's record."""
        return cls(
            number=commit.number,
            delta_version=commit.delta_version,
            numbers=frozenset([commit.number, *(numbers[-1] for numbers in commit.numbers.values())]),
            replaced=frozenset(n for numbers in commit.numbers.values() for n in numbers[:-1] if commit.replaced),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be taken back."""

    numbers: frozenset[int]
    """Rows of these commit numbers go."""
    whole: tuple[Ingestion, ...]
    """Ingestions whose changes to other rows are undone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraction(Ref):
    """What taking back did; kept in the metadata of the version that did it."""

    commits: list[int]
    """Numbers whose rows were removed."""
    reason: str
    rows: int = 0
    """Events that were removed."""
    restored: int = 0
    """Events of other commits that have their content from before again, or are back."""
    kept: int = 0
    """Events of other commits that stay as they were changed: changed again since, or too old to be restored."""
    earliest_us: dict[str, int] = field(default_factory=dict)
    """Commit number -> when the first of trained users' events removed or restored was shown; it may have none."""
    quarantine: list[str] = field(default_factory=list)
    """Paths of the removed rows below the lake's quarantine."""


def retractions(table: DeltaTable) -> list[Retraction]:
    """Return what was taken back so far, oldest first; walks the log, for an operator's command."""
    told = [json.loads(entry[TOLD]) for entry in table.history() if TOLD in entry]
    return [Retraction.from_json(value) for value in reversed(told) if value.get("kind") == "retract"]


class TakeBack:
    """One attempt to take an ingestion back.

    Args:
        open_at: Opens the table at a version; None: the newest.
        uri: The table.
        asked: What goes.
        keep: Called with a bucket and its rows that go, before they do; returns where it kept them.
        trained: Says of rows which are users' that are trained on, a boolean each.
    """

    def __init__(
        self,
        open_at: Open,
        uri: str,
        asked: Asked,
        *,
        keep: Callable[[int, pl.DataFrame], str],
        trained: Callable[[pl.DataFrame], pl.Series],
    ) -> None:
        table = open_at(None)
        assert table is not None
        self._table, self._asked, self._keep, self._trained = table, asked, keep, trained
        self._writing = Writing(table, uri, layout.schema_of(table))
        self._open_at = open_at
        self._files: dict[int, pl.DataFrame | None] = {}
        self._back = 0  # rows that were replaced and are there again
        self._sums = {"rows": 0, "restored": 0, "kept": 0}
        self._earliest: dict[str, int] = {}
        self._kept: list[str] = []

    def run(self, reason: str) -> Retraction | None:
        """Do it.

        Returns:
            What it did; nothing is written where there is nothing to do. None where another writer was faster: try
            again from a new one.
        """
        files = layout.files_of(self._table)
        for bucket in files["bucket"].unique().sort():
            self._bucket(bucket, layout.in_buckets(files, [bucket]))
        done = Retraction(
            commits=sorted(self._asked.numbers),
            reason=reason,
            earliest_us=self._earliest,
            quarantine=self._kept,
            **self._sums,
        )
        if not done.rows and not done.restored:
            return done
        try:
            told = {"kind": "retract", **done.to_json()}
            self._writing.commit(marks(self._table, told, change=self._back - done.rows, forgets=False))
        except CommitFailedError:
            self._writing.discard()
            return None
        return done

    def _bucket(self, bucket: int, files: pl.DataFrame) -> None:
        numbers = [*self._asked.numbers, *(one.number for one in self._asked.whole)]
        low, high = min(numbers), max(numbers)
        own = files.filter(
            (layout.at_least("commit", low) & layout.at_most("commit", high))
            | (layout.at_least("updated", low) & layout.at_most("updated", high))
        )
        if own.is_empty():
            return
        gone = read(own, pl.col("commit").is_in(self._asked.numbers))
        changed = read(own, self._was_changed())
        restored = self._content_before(bucket, changed)
        back = self._replaced_rows(bucket, files)
        again = self._changed_again(bucket, files)
        self._note(gone, pl.col("commit"))
        self._note(changed, pl.col("updated"))
        self._note(back, pl.lit(max((one.number for one in self._asked.whole), default=0)))
        if gone.height:
            self._kept.append(self._keep(bucket, gone))
        self._sums["rows"] += gone.height
        self._back += back.height
        self._sums["restored"] += restored.height + back.height
        self._sums["kept"] += changed.height - restored.height + again
        for file in own.iter_rows(named=True):
            self._rewrite(bucket, file, restored)
        for cluster in clusters(back):
            self._writing.add(bucket, cluster)

    def _was_changed(self) -> pl.Expr:
        """Return whether a row of another commit has what one of the ingestions made of it."""
        changed = [
            (pl.col("updated") == one.number) & ~pl.col("commit").is_in(one.numbers | self._asked.numbers)
            for one in self._asked.whole
        ]
        return pl.any_horizontal(changed) if changed else pl.lit(value=False)

    def _content_before(self, bucket: int, changed: pl.DataFrame) -> pl.DataFrame:
        """Return changed rows as they were before; without those of which that cannot be read any more."""
        rows = changed
        for one in sorted(self._asked.whole, key=lambda one: -one.delta_version):
            mine = rows.filter(pl.col("updated") == one.number)
            if mine.is_empty():
                continue
            was = self._at(one.delta_version - 1, bucket, layout.at_most("commit", one.number), _among(mine))
            rows = pl.concat([rows.filter(pl.col("updated") != one.number), was], how="diagonal_relaxed")
        return rows.select([name for name in changed.columns if name in rows.columns])

    def _replaced_rows(self, bucket: int, files: pl.DataFrame) -> pl.DataFrame:
        """Return rows that an ingestion removed, since a restated day did not deliver them again."""
        parts = []
        for one in self._asked.whole:
            if not one.replaced:
                continue
            low, high = min(one.replaced), max(one.replaced)
            may = layout.at_least("commit", low) & layout.at_most("commit", high)
            there = pl.col("commit").is_in(one.replaced)
            before = self._at(one.delta_version - 1, bucket, may, there)
            after = self._at(one.delta_version, bucket, may, there)
            now = read(files.filter(may), there)
            for known in (after, now):
                before = before.join(known.select(_KEYS), on=_KEYS, how="anti") if known.height else before
            parts.append(before)
        parts = [part for part in parts if part.height]
        return pl.concat(parts, how="diagonal_relaxed").sort(layout.ORDER) if parts else NO_ROWS.clone()

    def _changed_again(self, bucket: int, files: pl.DataFrame) -> int:
        """Count rows that an ingestion had changed, as its own version tells, and a later commit changed again."""
        count = 0
        for one in self._asked.whole:
            may = layout.at_least("updated", one.number) & layout.at_most("updated", one.number)
            was = self._at(one.delta_version, bucket, may, self._was_changed())
            was = was.filter(pl.col("updated") == one.number) if was.height else was
            if was.is_empty():
                continue
            since = (pl.col("updated") > one.number) & ~pl.col("updated").is_in(
                [other.number for other in self._asked.whole]
            )
            later = read(files.filter(layout.at_least("updated", one.number + 1)), since)
            count += was.join(later.select(_KEYS), on=_KEYS, how="semi").height if later.height else 0
        return count

    def _at(self, version: int, bucket: int, may: pl.Expr, wanted: pl.Expr) -> pl.DataFrame:
        """Read rows of a bucket at an older version; none where its files are gone."""
        try:
            if version not in self._files:
                table = self._open_at(version)
                self._files[version] = None if table is None else layout.files_of(table)
            files = self._files[version]
            return NO_ROWS if files is None else read(layout.in_buckets(files, [bucket]).filter(may), wanted)
        except (pl.exceptions.PolarsError, OSError) as error:
            logger.warning("bucket %d cannot be read as of version %d: %s", bucket, version, type(error).__name__)
            return NO_ROWS

    def _note(self, rows: pl.DataFrame, number: pl.Expr) -> None:
        """Note when the first of trained users' events was shown, by the commit that made models see it as it was."""
        if rows.is_empty():
            return
        mine = rows.select(number.alias("number"), pl.col("shown_at").dt.timestamp("us").alias("us"))
        for key, first in mine.filter(self._trained(rows)).group_by("number").agg(pl.col("us").min()).iter_rows():
            self._earliest[str(key)] = min(first, self._earliest.get(str(key), first))

    def _rewrite(self, bucket: int, file: dict[str, Any], restored: pl.DataFrame) -> None:
        """Write a file anew without the rows that go, and with those that are as before; others are left alone."""
        rows = layout.read_file(file["uri"])
        stay = rows.filter(~pl.col("commit").is_in(self._asked.numbers))
        if restored.height:
            mine = restored.join(stay.select(_KEYS), on=_KEYS, how="semi")
            stay = stay.join(mine.select(_KEYS), on=_KEYS, how="anti")
            if mine.height:
                stay = pl.concat([stay, mine], how="diagonal_relaxed").sort(layout.ORDER)
            elif stay.height == rows.height:
                return
        elif stay.height == rows.height:
            return
        self._writing.remove(file["path"], bucket, file["size"])
        if stay.height:
            self._writing.add(bucket, stay.sort(layout.ORDER))


NO_ROWS = pl.DataFrame(
    schema={
        "event_id": pl.String(),
        "user_id": pl.String(),
        "shown_at": layout.TIME,
        "commit": pl.Int64(),
        "updated": pl.Int64(),
    }
)


def _among(rows: pl.DataFrame) -> pl.Expr:
    return pl.struct(_KEYS).is_in(rows.select(pl.struct(_KEYS)).to_series().implode())


def read(files: pl.DataFrame, wanted: pl.Expr) -> pl.DataFrame:
    """Read the wanted rows of files of one bucket, with every column that any of them has, by user and time."""
    parts = [layout.read_file(uri, wanted) for uri in files["uri"]]
    return pl.concat(parts, how="diagonal_relaxed").sort(layout.ORDER) if parts else NO_ROWS.clone()
