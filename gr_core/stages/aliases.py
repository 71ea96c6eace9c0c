"""The registry's aliases outside a night: a projection of the journal that is set again from it, whatever befell it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gr_core import environment
from gr_core.config import Config
from gr_core.lake import store
from gr_core.lake.journal import Entry, Journal, challenger, champion, previous
from gr_core.lake.lock import night_lock
from gr_core.stages import restoring

# kinds of entries that may move an alias
MOVES = ("registered", "decided", "promoted", "rollback", "retracted")

logger = logging.getLogger(__name__)


def repair(config: Config, home: str) -> None:
    """Point the registry's aliases at what the journal says now.

    Never fails what it follows, since the journal has been told already: where the registry is away, the next night,
    or the next command that moves the champion, does it.

    Args:
        config: The run's config.
        home: URI of the home, whose lock is held.
    """
    entries = Journal(store.join(home, "lake", "journal")).entries()
    newest = challenger(entries)
    if newest is None:
        return
    from gr_core.registry.mlflow_store import MlflowStore  # costs a second, and only models have aliases

    best, before = champion(entries), previous(entries)
    try:
        models = MlflowStore(environment.tracking_uri(home), environment.artifact_root(home), config.name)
        models.repair(
            champion=best.version if best else None, previous=before.version if before else None, challenger=newest
        )
        restoring.restore_champions(models, entries)
    except Exception as error:  # noqa: BLE001 -- a registry of any make may fail in any way, and the journal stands
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        logger.warning("the registry's aliases are not set yet, the next night does it: %s", told)


def is_settled(entries: Sequence[Entry]) -> bool:
    """Tell whether the aliases were set after the last entry that may have moved one.

    A night that completes sets them last; after any other move a kill may have come before its aliases.
    """
    for entry in reversed(entries):
        if entry.kind in MOVES:
            return False
        if entry.kind == "finished" and entry.payload["state"] == "completed":
            return True
    return True


def settle(config: Config, home: str) -> None:
    """Repair the aliases as `repair_if_moved` does, for a command that holds no lock and finds nothing else to do.

    Args:
        config: The run's config.
        home: URI of the home; where somebody else works in it, the aliases are his to set.
    """
    if is_settled(Journal(store.join(home, "lake", "journal")).entries()):
        return
    with night_lock(home, "aliases") as holder:
        if holder is None:
            repair_if_moved(config, home)


def repair_if_moved(config: Config, home: str) -> None:
    """Repair the aliases where a kill may have left them behind; reads the journal alone where it cannot have.

    Args:
        config: The run's config.
        home: URI of the home, whose lock is held.
    """
    if not is_settled(Journal(store.join(home, "lake", "journal")).entries()):
        repair(config, home)
