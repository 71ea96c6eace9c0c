"""What a day that is run late starts from, and which models are out of use: pure folds over journal entries, no storage."""

from __future__ import annotations

from collections.abc import Sequence

from gr_core.lake.entries import Entry
from gr_core.lake.ledger import Version, champion, champions, nights, versions
from gr_core.lake.lineage import Lineage


def is_older(entries: Sequence[Entry], day: str) -> bool:
    """Tell whether a lake day (YYYY-MM-DD) is not after the champion's; False without a champion."""
    best = champion(entries)
    return best is not None and day <= best.date


def predecessors(entries: Sequence[Entry], day: str) -> list[Version]:
    """Return the models of the main line's finished nights before a day, nearest first, without tainted and pruned ones.

    Args:
        entries: The whole journal.
        day: The lake day, YYYY-MM-DD.
    """
    known, lineage = versions(entries), Lineage.of(entries)
    wrong = lineage.tainted | lineage.pruned
    earlier = [
        record
        for record in nights(entries).values()
        if record.is_main and record.is_finished and record.date < day and record.version is not None
    ]
    earlier.sort(key=lambda record: record.date, reverse=True)
    found = (known[record.version] for record in earlier if record.version in known)
    return [version for version in found if version.version not in wrong]


def start_of(entries: Sequence[Entry], late: str | None = None) -> int | None:
    """Return the version that a night starts from: the champion; None: there is none.

    Args:
        entries: The whole journal.
        late: The lake day (YYYY-MM-DD) of a night that is backfilled: where it is not after the champion's, the night
            starts from the model of the nearest night before it.
    """
    if late is not None and is_older(entries, late):
        nearest = next(iter(predecessors(entries, late)), None)
        return None if nearest is None else nearest.version
    best = champion(entries)
    return None if best is None else best.version


def out_of_use(entries: Sequence[Entry]) -> dict[int, str]:
    """Return the versions that a rollback took out of use, with its reason, and that nothing has brought back.

    What is chosen as champion, by a promotion or as what a rollback goes to, brings back what it was warm-started from.
    """
    found: dict[int, str] = {}
    lineage = Lineage()
    for place, entry in enumerate(entries):
        lineage.read(entry)
        if entry.kind not in ("promoted", "rollback"):
            continue
        if entry.kind == "rollback":
            before, after = ({one.version for one in champions(entries[:end])} for end in (place, place + 1))
            found |= dict.fromkeys(before - after, str(entry.payload["reason"]))
        chosen: int | None = entry.payload["version"]
        while chosen is not None:
            found.pop(chosen, None)
            chosen = lineage.parents.get(chosen)
    return found


def held_for_lineage(entries: Sequence[Entry], parent: int | None) -> list[str]:
    """Return why a night's challenger must be held whatever the gate measures: its lineage was rolled back.

    Args:
        entries: The whole journal.
        parent: The version that the night was warm-started from.
    """
    out, lineage = out_of_use(entries), Lineage.of(entries)
    while parent is not None:
        if parent in out:
            return [f"gate.lineage: it was warm-started from version {parent}, which was rolled back ({out[parent]})"]
        parent = lineage.parents.get(parent)
    return []
