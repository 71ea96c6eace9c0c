"""Upkeep after a finished night: few files in the event table, and none that no night reads. Never fails a night."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from gr_core.errors import DaybreakError
from gr_core.lake import keeping
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Entry
from gr_core.night import Night

logger = logging.getLogger(__name__)


def kept_versions(entries: Iterable[Entry], rerun_days: int) -> list[int]:
    """Return the event table's versions that nights may still read, ascending.

    Args:
        entries: The journal.
        rerun_days: Nights of so many days before the newest may be repeated.
    """
    return list(keeping.delta_versions(entries, rerun_days))


def tidy(night: Night) -> dict[str, Any]:
    """Compact the event table and delete files of old versions, as far as that is due.

    A crash on the way, a race with another writer or a store that does not answer loses nothing: the next night does
    what is left.

    Returns:
        What was done (`EventTable.maintain`), or {"error": its type}.
    """
    config = night.settings
    try:
        keep = kept_versions(night.journal.entries(), config.lake.rerun_days)
        return EventTable(night.table_uri, config).maintain(keep_versions=keep).to_json()
    except (DaybreakError, OSError) as error:
        logger.warning("the event table's upkeep is left to the next night: %s", error)
        return {"error": type(error).__name__}
