"""What of a home is still needed, and why: pure folds over journal entries, no storage.

`daybreak prune` removes the rest, and the upkeep after a night asks for the event table's versions. A night is open
until it finished, whatever its mode: a night, a day of a backfill, an experiment, a full retrain or a window of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from datetime import timedelta
from typing import Any

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import NightRecord, champion, nights, previous, versions
from gr_core.lake.lineage import Lineage

NIGHTS = "nights"
_BELOW = f"/{NIGHTS}/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What stays, each with the reasons for it."""

    versions: dict[int, list[str]] = field(default_factory=dict)
    nights: dict[str, list[str]] = field(default_factory=dict)
    """Keys of nights of which every file stays."""
    folders: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(night, folder in it) that a kept version or an open night reads; of a night that is not kept otherwise."""


def kept(entries: Sequence[Entry], *, keep_versions: int, rerun_days: int) -> Keep:
    """Return what is still needed.

    Args:
        entries: The journal.
        keep_versions: The newest registered versions that stay in any case, at least 1.
        rerun_days: Nights of so many lake days before the newest may be repeated.
    """
    records, known = nights(entries), versions(entries)
    found = Keep()
    _keep_nights(found, records, rerun_days)
    _keep_versions(found, entries, keep_versions)
    for record in records.values():
        if record.key in found.nights:
            _keep_needed(found, entries, record)
    _keep_roots(found, entries)
    for payload in (entry.payload for entry in entries if entry.kind == "registered"):
        version = payload["version"]
        if version in found.versions:
            for place in _named(payload):
                found.folders.setdefault(place, []).append(f"version {version}")
    for version in set(found.versions) - known.keys():
        del found.versions[version]  # never registered, or pruned before
    return found


def delta_versions(entries: Iterable[Entry], rerun_days: int) -> dict[int, list[str]]:
    """Return the event table's versions that nights may still read, each with the nights that do.

    Args:
        entries: The journal.
        rerun_days: Nights of so many days before the newest may be repeated.
    """
    told: dict[str, set[int]] = {}
    entries = list(entries)
    for entry in entries:
        told.setdefault(entry.night, set()).update(_numbers(entry.payload))
    found: dict[int, list[str]] = {}
    records = nights(entries)
    read = [record for record in records.values() if record.delta_version is not None]
    oldest = _oldest(read, rerun_days)
    for record in records.values():
        # an open one may have pinned a version in an entry of its own kind
        own = told[record.key] if not record.is_finished else {record.delta_version}
        beside = records.get(record.beside or "") if not record.is_finished else None
        if beside is not None:
            own = {*own, beside.delta_version}  # an unfinished experiment reads what its night read
        if not record.is_finished or record.date >= oldest:
            for version in own:
                if version is not None:
                    found.setdefault(version, []).append(record.key)
    return dict(sorted(found.items()))


def _oldest(records: Iterable[NightRecord], rerun_days: int) -> str:
    """Return the first lake day that may be repeated; after every day where there is no night."""
    newest = max((record.date for record in records), default=None)
    return "~" if newest is None else (Date.fromisoformat(newest) - timedelta(days=rerun_days)).isoformat()


def _keep_nights(found: Keep, records: dict[str, NightRecord], rerun_days: int) -> None:
    oldest = _oldest(records.values(), rerun_days)
    besides = {record.beside: record.key for record in records.values() if record.beside and not record.is_finished}
    for record in records.values():
        why = found.nights.setdefault(record.key, [])
        if record.key in besides:
            why.append(f"{besides[record.key]} is set beside it and is open")
        if not record.is_finished:
            why.append(f"{record.mode} {record.key} is open")
        if record.date >= oldest:
            why.append(f"may be repeated (lake.rerun_days {rerun_days})")
        if not why:
            del found.nights[record.key]


def _keep_versions(found: Keep, entries: Sequence[Entry], number: int) -> None:
    known, records = versions(entries), nights(entries)
    best, before = champion(entries), previous(entries)
    if best is not None:
        _add(found, best.version, "champion")
    if before is not None:
        _add(found, before.version, "previous: rollback goes to it")
    for kind in ("", " of experiments"):
        mine = [version for version, one in known.items() if (one.experiment is not None) == bool(kind)]
        for version in sorted(mine)[-number:]:
            _add(found, version, f"one of the last {number}{kind}")
    newest: dict[str, int] = {}
    for version, one in known.items():
        record = records.get(one.night)
        if record is not None:
            newest[record.mode] = max(version, newest.get(record.mode, 0))
        if record is not None and record.key in found.nights:
            _add(found, version, f"night {record.key} {found.nights[record.key][0]}")
    for mode, version in newest.items():
        # the next day of a backfill starts from it; every night is compared with the last full retrain
        _add(found, version, f"newest of mode {mode}")


def _keep_needed(found: Keep, entries: Sequence[Entry], record: NightRecord) -> None:
    """Keep what a night that may run again starts from: its parent, and whatever its journal entries name."""
    parent, lineage = record.parent_version, Lineage.of(entries)
    if parent is not None:
        _add(found, parent, f"parent of {record.key}")
        instead = lineage.untainted(parent)
        if instead is not None and instead != parent and not record.is_finished:
            _add(found, instead, f"{record.key} starts from it, its parent {parent} is tainted")
    for payload in (entry.payload for entry in entries if entry.night == record.key):
        for place in _named(payload):
            if place[0] not in found.nights:
                found.folders.setdefault(place, []).append(f"{record.key} names it")


def _keep_roots(found: Keep, entries: Sequence[Entry]) -> None:
    """Keep the root of each kept version's lineage: what it was at its last full retrain, or its first night."""
    lineage = Lineage.of(entries)
    for version in list(found.versions):
        root = lineage.root(version)
        if root is not None and root != version:
            _add(found, root, "root of a lineage")


def _add(found: Keep, version: int, why: str) -> None:
    reasons = found.versions.setdefault(version, [])
    if why not in reasons:
        reasons.append(why)


def _named(values: Any) -> Iterator[tuple[str, str]]:
    """Yield (night, folder in it) of every URI below the home's nights among JSON values."""
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _named(value)
    elif isinstance(values, str) and _BELOW in values:
        parts = values.rpartition(_BELOW)[2].split("/")
        if len(parts) > 1:
            yield parts[0], parts[1]


def _numbers(values: Any) -> Iterator[int]:
    """Yield every Delta version that JSON values name."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key == "parent":
                continue  # what its parent read
            if key == "delta_version" and isinstance(value, int):
                yield value
            else:
                yield from _numbers(value)
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value)
