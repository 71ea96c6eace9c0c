"""The home's model registry: opened, and its aliases set to what the journal says, which is the truth about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gr_core import environment
from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.lake.journal import Entry, champion, previous, versions
from gr_core.registry.mlflow_store import MlflowStore

logger = logging.getLogger(__name__)


def model_store(config: Config, home: str) -> MlflowStore:
    """Open the model registry of a home."""
    return MlflowStore(environment.tracking_uri(home), environment.artifact_root(home), config.name)


def repair_aliases(entries: Sequence[Entry], models: MlflowStore) -> None:
    """Set the registry's aliases to what the journal says; a version that the registry lost is left out, loudly."""
    chosen, before = champion(entries), previous(entries)
    wanted = {
        "champion": chosen.version if chosen else None,
        "previous": before.version if before else None,
        "challenger": next(reversed(versions(entries)), None),
    }
    for alias, version in wanted.items():
        try:
            _ = models.version(version) if version is not None else None
        except UsageError:
            logger.warning("the registry has no version %s, the journal's %s; the alias is left out", version, alias)
            wanted[alias] = None
    models.repair(**wanted)
