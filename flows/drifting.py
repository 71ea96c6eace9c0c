"""What follows a night whose drift calls for a full retrain: the deployment where a worker serves it, else this process."""

from __future__ import annotations

import logging
from datetime import date as Date
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import DeploymentStatus, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from gr_core.config import Config
from gr_core.lake.lock import RETRAIN_LOCK, running_night
from gr_core.stages import drifting

logger = logging.getLogger("gr_core.flows")

DEPLOYMENT = "full-retrain/full-retrain"
_WAITING = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


def follow(settings: Config, home: str, parameters: dict[str, Any]) -> None:
    """Start the full retrain that is wanted, or take up the one that was broken off; the night before it has ended.

    A night within another flow, such as a missed one, starts nothing: the flow that it is part of has nights to run.
    Never fails the night: what befalls the full retrain stands in the journal and is a finding of `daybreak status`.

    Args:
        settings: The night's config.
        home: URI of the home.
        parameters: config, overrides and runner of the night's flow.
    """
    if flow_run.parent_flow_run_id is not None:
        return
    through = drifting.wanted(settings, home)
    if through is None or running_night(home, name=RETRAIN_LOCK) is not None:
        return
    parameters = {**parameters, "home": home, "through": through}
    try:
        if not _deployed(parameters):
            from flows.full_retrain import full_retrain  # which imports the nightly flow

            full_retrain(**parameters)
    except Exception as error:  # noqa: BLE001 -- of any make; it is told, and the next night tries again
        logger.warning("the full retrain through %s failed (%s: %s)", through, type(error).__name__, error)


def _deployed(parameters: dict[str, Any]) -> bool:
    """Start the deployment's run, unless one waits or runs; False where no worker serves the deployment."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            return False
        if found.status != DeploymentStatus.READY:
            return False
        runs = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_WAITING))),
            limit=1,
        )
    if runs:
        logger.info("a run of %s is under way already", DEPLOYMENT)
        return True
    through: Date = parameters["through"]
    values = {**parameters, "through": through.isoformat()}
    run: Any = run_deployment(DEPLOYMENT, parameters=values, timeout=0, as_subflow=False)
    logger.info("full retrain through %s starts as flow run %s of %s", through, run.name, DEPLOYMENT)
    return True
