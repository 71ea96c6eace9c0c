"""A night's MLflow run while the night goes on: there when training starts, ended as the night ends.

A projection, as aliases are: a registry that does not answer never fails here what it would only show. The register
stage needs the registry, and says so itself.
"""

from __future__ import annotations

import logging

from gr_core import environment
from gr_core.config import Config
from gr_core.night import Night
from gr_core.registry.base import RunStatus
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.stages import judging

logger = logging.getLogger(__name__)

_begun: set[tuple[str, str]] = set()  # (home, night) of the runs that this process began and has not ended


def begin(night: Night) -> None:
    """Show the night and its training as running, beside training, which does not wait for the registry; runs that a kill left running are ended as KILLED (cases A9, B2).

    Args:
        night: The night, whose lock is held.
    """
    _begun.add((night.home, night.key))
    try:
        models = judging.model_store(night, night.settings)
        models.close_dead(keep=night.key)
        run = models.start_night(night.key, params={}, tags={"date": night.date, "mode": night.mode})
        models.child(run, "train")
    except Exception as error:  # noqa: BLE001 -- a registry of any make may fail in any way
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        logger.warning("MLflow does not show night %s yet, the register stage tries again: %s", night.key, told)


def end_dead(config: Config, home: str) -> None:
    """End as KILLED the runs that a killed night left running: of nights that begin again, `begin` does.

    Args:
        config: The run's config.
        home: URI of the home, whose lock is held; none of its nights runs.
    """
    try:
        uris = environment.tracking_uri(home), environment.artifact_root(home)
        ended = MlflowStore(*uris, config.name).close_dead(keep=None)
    except Exception as error:  # noqa: BLE001 -- a registry of any make may fail in any way
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        logger.warning("MLflow may still show killed nights as running, the next night ends them: %s", told)
        return
    if ended:
        logger.info("MLflow's runs of killed nights are ended: %s", ", ".join(ended))


def conclude(night: Night, status: RunStatus) -> None:
    """End the night's run, with its children, where this process began it and the night did not finish.

    Args:
        night: The night.
        status: KILLED or FAILED.
    """
    if night.finished or (night.home, night.key) not in _begun:
        return
    _begun.discard((night.home, night.key))
    try:
        models = judging.model_store(night, night.settings)
        models.finish(models.start_night(night.key, params={}, tags={}), status)
    except Exception as error:  # noqa: BLE001 -- what ended the night stands; the next one ends the run
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        logger.warning("MLflow still shows night %s as running, the next night ends it: %s", night.key, told)
