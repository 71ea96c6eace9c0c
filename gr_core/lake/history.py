"""The history store of one bucket: what a night needs to know of its users, at a cost that follows the night.

Derived from the event table and never the truth: entries of capped histories (history_file, history_rows), and a
manifest for each Delta version it was brought to. Whatever is missing, damaged or made by other rules is as if it were
not there, and the bucket is read again.

Log-structured: a night appends one generation with the entries of the users it touched, the newest of each user
counts. FANOUT generations of a level are merged into one of the next; of the others, one that is less than half alive is
written again. So an entry is written about three times before it lies still, whatever the table's size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import polars as pl

from gr_core.hashing import fingerprint
from gr_core.lake import history_entries, history_file, store
from gr_core.lake.history_entries import Array, Entries, HistoryColumns, Longs
from gr_core.lake.history_file import Generation, Reader

logger = logging.getLogger(__name__)

HISTORY_FORMAT = 2
FANOUT = 16
_BASE = 9  # level of what a whole read writes, above all that merging makes
_KEPT = 4  # manifests kept for re-runs of older nights
_ALIVE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Entries of users."""

    rows: pl.DataFrame
    """Rows with the columns' names; users that have no entry have none."""
    floors: pl.DataFrame
    """user_id, floor (int64, us; see history_rows): one row a user with an entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What entries shall hold: rows with the columns' names, those of a user together, and floors, one a user."""

    head: pl.DataFrame
    head_floors: Longs
    deep: pl.DataFrame
    """Of some of the users only."""
    deep_floors: Longs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manifest:
    version: int
    commit: int
    erasures: int
    generations: tuple[Generation, ...]
    """Oldest first: by falling level, then by age."""


class Snapshot:
    """The store as one manifest has it.

    Args:
        folder: URI of the bucket's folder.
        manifest: The manifest.
        columns: What is kept.
    """

    def __init__(self, folder: str, manifest: _Manifest, columns: HistoryColumns) -> None:
        self._columns = columns
        self.version = manifest.version
        self.commit = manifest.commit
        """Rows that came or changed with a later commit are not in it."""
        self.erasures = manifest.erasures
        self.readers = [Reader(folder, generation, columns) for generation in manifest.generations]

    @property
    def bytes_read(self) -> int:
        """Bytes of indexes and entries read so far."""
        return sum(reader.bytes_read for reader in self.readers)

    def read(self, users: pl.Series, *, deep: bool = False) -> Stored:
        """Read entries of users.

        Args:
            users: Distinct user ids.
            deep: Their deep entries instead of their heads.

        Raises:
            FormatError: A file is missing or damaged.
        """
        found = self.locate(history_entries.keys_of(users.to_list(), deep=deep))
        pairs = [(reader, at) for reader, at in zip(self.readers, found, strict=True) if len(at[0])]
        entries = history_entries.concat([reader.read(at) for reader, (_, at) in pairs], self._columns)
        order = np.concatenate([np.empty(0, np.int64), *(which for _, (which, _) in pairs)])
        owners = users.gather(order)
        rows = history_entries.decode(entries, owners, self._columns)
        return Stored(rows=rows, floors=pl.DataFrame({"user_id": owners, "floor": entries.floors}))

    def locate(self, keys: Array) -> list[tuple[Longs, Longs]]:
        """Find the newest entry of each key: for each reader, which of the keys it has, and at which places."""
        found: list[tuple[Longs, Longs]] = []
        left = np.arange(len(keys))
        for reader in reversed(self.readers):
            at = reader.find(keys[left])
            found.append((left[at >= 0], at[at >= 0]))
            left = left[at < 0]
        return found[::-1]


class HistoryStore:
    """The store of one bucket; its one writer is the night that holds the home's lock.

    Args:
        uri: The folder of all buckets.
        bucket: The bucket.
        columns: What is kept of a row.
        max_history: How much the entries are capped for.
    """

    def __init__(self, uri: str, bucket: int, columns: HistoryColumns, max_history: int) -> None:
        self.folder = bucket_folder(uri, bucket)
        self._columns = columns
        self._rules = _rules(columns, max_history)
        self.bytes_written = 0

    def newest(self) -> tuple[int, int]:
        """Return version and commit of the newest usable manifest; (-1, -1) without one."""
        return next(((found.version, found.commit) for found in self._manifests()), (-1, -1))

    def snapshot(self, version: int, commit: int, erasures: int) -> Snapshot | None:
        """Return the newest state at or below a version of the event table.

        Args:
            version: The Delta version that the night pinned.
            commit: The newest commit that the night reads of it.
            erasures: How often rows had been removed by then; a state made of another count is not used.

        Returns:
            The state; None: the bucket has to be read.
        """
        for manifest in self._manifests():
            if manifest.version <= version and manifest.commit <= commit and manifest.erasures == erasures:
                return Snapshot(self.folder, manifest, self._columns)
        return None

    def write_base(self, version: int, commit: int, erasures: int, cut: Cut) -> None:
        """Write the state of a version from all users' rows.

        Args:
            version: The Delta version that was read.
            commit: The newest commit read of it.
            erasures: How often rows had been removed by then.
            cut: Of all users.
        """
        base = self._write(f"{version:020d}-base", _BASE, self._entries(cut))
        self._publish(_Manifest(version=version, commit=commit, erasures=erasures, generations=(base,)))

    def advance(self, before: Snapshot, version: int, commit: int, cut: Cut) -> None:
        """Bring a state to a later version.

        Args:
            before: The state.
            version: The Delta version to bring it to.
            commit: The newest commit read of it.
            cut: Of the users touched since then.

        Raises:
            FormatError: A file is missing or damaged.
        """
        readers = before.readers
        generations = [reader.generation for reader in readers]
        if cut.head.height:
            entries = self._entries(cut)
            for place, (reader, (_, at)) in enumerate(zip(readers, before.locate(entries.keys), strict=True)):
                old = reader.generation
                generations[place] = replace(
                    old, live_users=old.live_users - len(at), live_bytes=old.live_bytes - reader.bytes_of(at)
                )
            generations.append(self._write(f"{version:020d}", 0, entries))
        cleaned = self._clean(version, [one for one in generations if one.live_users])
        self._publish(_Manifest(version=version, commit=commit, erasures=before.erasures, generations=tuple(cleaned)))

    def _entries(self, cut: Cut) -> Entries:
        head = history_entries.encode(cut.head, self._columns, cut.head_floors)
        if cut.deep.is_empty():
            return head
        deep = history_entries.encode(cut.deep, self._columns, cut.deep_floors, deep=True)
        return history_entries.concat([head, deep], self._columns)

    def purge(self, users: Sequence[str], erasures: int) -> int:
        """Rewrite every generation that holds one of these users without them, and take the new erasure count.

        Only states of the count just before are taken along: what else was removed is not known here, so that any
        other state is left behind and the bucket read again.

        Args:
            users: Who is to be forgotten; empty where none of them is of this bucket.
            erasures: The event table's count with this removal.

        Returns:
            Entries removed, superseded ones included.
        """
        keys = np.concatenate([history_entries.keys_of(users, deep=deep) for deep in (False, True)])
        kept = [found for found in self._manifests() if found.erasures == erasures - 1]
        fresh: dict[str, Generation] = {}
        removed = 0
        for found in reversed(kept):
            snapshot = Snapshot(self.folder, found, self._columns)
            ours = []
            for reader, (_, alive) in zip(snapshot.readers, snapshot.locate(keys), strict=True):
                old = reader.generation
                if old.name not in fresh:
                    stay = reader.find_other(keys)
                    removed += old.users - len(stay)
                    without = old if len(stay) == old.users else self._write(old.name, old.level, reader.read(stay))
                    fresh[old.name] = without
                live_users, live_bytes = old.live_users - len(alive), old.live_bytes - reader.bytes_of(alive)
                ours.append(replace(fresh[old.name], live_users=live_users, live_bytes=live_bytes))
            self._put(replace(found, erasures=erasures, generations=tuple(one for one in ours if one.users)))
        self._sweep([found for found in self._manifests() if found.erasures == erasures])
        return removed

    def is_stale(self, erasures: int) -> bool:
        """Tell whether files may hold rows from before the newest removal: a killed one may have left them.

        Args:
            erasures: How often rows have been removed from the event table.
        """
        manifests = self._manifests()
        named = _named(manifests)
        return any(one.erasures != erasures for one in manifests) or any(n not in named for n in _listed(self.folder))

    def _clean(self, version: int, generations: list[Generation]) -> list[Generation]:
        """Merge full levels, and write again what is mostly superseded."""
        for level in range(_BASE):
            own = [one for one in generations if one.level == level]
            if len(own) > FANOUT:
                place = generations.index(own[0])
                newer = generations[place + len(own) :]
                merged = self._rewrite(f"{version:020d}-merged-{level}", level + 1, own, newer)
                generations = [*generations[:place], merged, *newer]
        for place, one in enumerate(generations):
            if one.level > 0 and one.live_bytes < _ALIVE * one.data_bytes:
                newer = generations[place + 1 :]
                generations[place] = self._rewrite(f"{version:020d}-cleaned-{place}", one.level, [one], newer)
        return [one for one in generations if one.live_users]

    def _rewrite(self, name: str, level: int, old: list[Generation], newer: list[Generation]) -> Generation:
        """Write the live entries of neighbouring generations as one."""
        later = [Reader(self.folder, one, self._columns) for one in newer]
        parts = []
        for one in reversed(old):
            reader = Reader(self.folder, one, self._columns)
            alive = np.ones(one.users, dtype=np.bool_)
            for other in later:
                alive &= other.find(reader.keys) < 0
            parts.append(reader.read(np.flatnonzero(alive)))
            later.append(reader)
        return self._write(name, level, history_entries.concat(parts, self._columns))

    def _write(self, name: str, level: int, entries: Entries) -> Generation:
        # a version may be written a second time, after a kill or by other rules: its files are never the same ones
        taken = set(_listed(self.folder))
        stem = name.split("~")[0]
        unused = next(text for text in (f"{stem}~{n}" for n in count()) if f"{text}.data" not in taken)
        written = history_file.write(self.folder, unused, level, entries, self._columns)
        self.bytes_written += written.data_bytes + written.index_bytes
        return written

    def _publish(self, manifest: _Manifest) -> None:
        self._put(manifest)
        self._sweep(self._manifests()[:_KEPT])

    def _put(self, manifest: _Manifest) -> None:
        told = {
            "format": HISTORY_FORMAT,
            "rules": self._rules,
            "version": manifest.version,
            "commit": manifest.commit,
            "erasures": manifest.erasures,
            "generations": [one.to_json() for one in manifest.generations],
        }
        store.write_json(store.join(self.folder, _manifest_name(manifest.version)), {**told, "digest": _digest(told)})

    def _manifests(self) -> list[_Manifest]:
        """Return the usable manifests, newest version first."""
        names = sorted(name for name in _listed(self.folder) if name.startswith("manifest-"))
        found = [_parsed(store.join(self.folder, name), self._rules) for name in reversed(names)]
        return [one for one in found if one is not None]

    def _sweep(self, kept: list[_Manifest]) -> None:
        """Remove manifests that are not kept, then generations that no manifest names."""
        stay = _named(kept)
        gone = [name for name in _listed(self.folder) if name not in stay]
        for name in sorted(gone, key=lambda name: not name.startswith("manifest-")):
            store.remove(store.join(self.folder, name))


def bucket_folder(uri: str, bucket: int) -> str:
    """Return the URI of a bucket's folder below that of the store."""
    return store.join(uri, f"bucket-{bucket:05d}")


def _rules(columns: HistoryColumns, max_history: int) -> dict[str, Any]:
    """Return what a state must have been made by to be used."""
    return {"texts": list(columns.texts), "times": list(columns.times), "max_history": max_history}


def _named(manifests: Sequence[_Manifest]) -> set[str]:
    """Return the names of manifests, and of the files that they name."""
    files = {f"{g.name}.{kind}" for one in manifests for g in one.generations for kind in ("data", "index")}
    return files | {_manifest_name(one.version) for one in manifests}


def _manifest_name(version: int) -> str:
    return f"manifest-{version:020d}.json"


def _digest(told: dict[str, Any]) -> str:
    return fingerprint({key: value for key, value in told.items() if key != "digest"})


def _listed(folder: str) -> list[str]:
    return [found.name for found in store.listing(folder)]


def _parsed(uri: str, rules: dict[str, Any]) -> _Manifest | None:
    """Return a manifest; None where it is damaged, of another format or made by other rules."""
    try:
        told = store.read_json(uri)
        if told["digest"] != _digest(told):
            logger.warning("%s is damaged; the bucket's histories are read from the event table", uri)
            return None
        if told["format"] != HISTORY_FORMAT or told["rules"] != rules:
            return None
        return _Manifest(
            version=told["version"],
            commit=told["commit"],
            erasures=told["erasures"],
            generations=tuple(Generation.from_json(one) for one in told["generations"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s); the bucket's histories are read from the event table", uri, error)
        return None
