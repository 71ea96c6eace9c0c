"""Parents and taint of the registered versions: pure folds over journal entries, no storage."""

from __future__ import annotations

from collections.abc import Iterable

from gr_core.lake.entries import Entry

FULL_RETRAIN = ("full_retrain", "full-retrain")
"""How `opened` names a full retrain's mode."""


class Lineage:
    """What is known of parents and taint after the entries that were read, in order."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        """Version -> the version it was warm-started from, in the order of registration."""
        self.tainted: set[int] = set()
        self.pruned: set[int] = set()
        """Versions without files: nothing starts from them."""
        self.full_retrains: set[int] = set()
        """Versions of nights in a full retrain's mode."""
        self._pinned: dict[str, int | None] = {}
        self._modes: dict[str, str] = {}

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Lineage:
        """Read a whole journal."""
        lineage = cls()
        for entry in entries:
            lineage.read(entry)
        return lineage

    def read(self, entry: Entry) -> None:
        """Take in one entry."""
        payload = entry.payload
        first = entry.kind == "opened" and entry.night not in self._pinned
        if first or (entry.kind == "attempt" and "parent" in payload):
            self._pinned[entry.night] = (payload.get("parent") or {}).get("version")
            self._modes.setdefault(entry.night, payload.get("mode", ""))
        elif entry.kind == "registered":
            parent = self.parents[payload["version"]] = self._pinned.get(entry.night)
            if self._modes.get(entry.night) in FULL_RETRAIN:
                self.full_retrains.add(payload["version"])
            if parent in self.tainted:
                self.tainted.add(payload["version"])
        elif entry.kind == "retracted":
            self.tainted |= self.descendants(payload["tainted"])
        elif entry.kind == "pruned":
            self.pruned.update(payload["versions"])

    def descendants(self, roots: Iterable[int]) -> set[int]:
        """Return registered versions and all that were warm-started from them, through any number of nights."""
        found = set(roots) & self.parents.keys()
        for version, parent in self.parents.items():  # a version is registered after its parent
            if parent in found:
                found.add(version)
        return found

    def root(self, version: int | None) -> int | None:
        """Return the version itself or its newest ancestor that is a full retrain or has no parent; None without one."""
        while version is not None and version not in self.full_retrains and self.parents.get(version) is not None:
            version = self.parents[version]
        return version

    def untainted(self, version: int | None, bad: Iterable[int] = ()) -> int | None:
        """Return the version itself, else its newest ancestor, that is not in `bad`, tainted or pruned; None: all are."""
        wrong = self.tainted | self.pruned | set(bad)
        while version is not None and version in wrong:
            version = self.parents.get(version)
        return version


def tainted(entries: Iterable[Entry]) -> frozenset[int]:
    """Return the versions that were trained on retracted rows, or descend from one that was."""
    return frozenset(Lineage.of(entries).tainted)
