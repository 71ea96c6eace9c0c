"""What `daybreak prune` removed from a home, as the journal tells it: a pure fold, and the refusals that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gr_core.errors import UsageError
from gr_core.lake.entries import Entry
from gr_core.refs import iso


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What was removed, each with the time of its entry, microseconds since the epoch."""

    versions: Mapping[int, int] = field(default_factory=dict)
    nights: Mapping[str, int] = field(default_factory=dict)
    """Keys of nights without their stages' files; a version of theirs may still be there."""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Pruned:
        """Read a whole journal."""
        versions: dict[int, int] = {}
        nights: dict[str, int] = {}
        for entry in entries:
            if entry.kind == "pruned":
                versions |= {version: entry.at_us for version in entry.payload["versions"] if version not in versions}
                nights |= {night: entry.at_us for night in entry.payload["nights"] if night not in nights}
        return cls(versions=versions, nights=nights)


def refuse_version(entries: Iterable[Entry], version: int, where: str = "version") -> None:
    """Refuse a version whose files `daybreak prune` removed.

    Raises:
        UsageError: Names the version, when it was pruned, and the remedy.
    """
    at_us = Pruned.of(entries).versions.get(version)
    if at_us is not None:
        raise UsageError(
            f"version {version} was pruned at {iso(at_us)}: `daybreak prune` removed its checkpoint, and only its record is "
            "left in journal and registry; name a version that is still there (prune.keep_versions says how many stay)",
            where=where,
        )


def refuse_night(entries: Iterable[Entry], key: str, rerun_days: int) -> None:
    """Refuse to repeat a stage of a night, or to score on its rows, whose files `daybreak prune` removed.

    Raises:
        UsageError: Names the night, when it was pruned, and the remedy.
    """
    at_us = Pruned.of(entries).nights.get(key)
    if at_us is not None:
        raise UsageError(
            f"night {key} was pruned at {iso(at_us)}: `daybreak prune` removed what its stages wrote, so nothing of it can "
            f"be repeated or scored again; nights of the last lake.rerun_days ({rerun_days}) days can",
            where=key,
        )
