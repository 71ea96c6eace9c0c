"""Work pools and deployments of a Prefect server: prefect.yaml made out for one config and home."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

from gr_core.config import Config


def render(source: Path, target: Path, settings: Config, config: str, home: str) -> Path:
    """Write a prefect.yaml whose deployments run one config in one home.

    The embedded world's days are not the calendar's: there, schedules are deployed but not active, and `fill_in_date`
    says which day is next.

    Args:
        source: The checkout's prefect.yaml.
        target: Where the copy goes.
        settings: The config, read.
        config: Its path.
        home: URI of the home.

    Returns:
        target.
    """
    told: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
    told.pop("definitions", None)  # anchors, which are resolved
    path = Path(config).absolute()  # nights start in the checkout
    inside = path.is_relative_to(source.parent)
    given = {"config": str(path.relative_to(source.parent) if inside else path), "home": home}
    for deployment in told["deployments"]:
        takes = _parameters(deployment["entrypoint"])
        ours = {key: value for key, value in given.items() if key in takes}
        deployment["parameters"] = {**deployment.get("parameters", {}), **ours}
        if settings.source.world is not None:
            deployment["schedules"] = [{**one, "active": False} for one in deployment.get("schedules", [])]
    target.write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
    return target


def _parameters(entrypoint: str) -> set[str]:
    module, _, name = entrypoint.rpartition(".")
    return set(getattr(importlib.import_module(module), name).parameters.properties)


def make_pools(api: str, file: Path) -> list[str]:
    """Make the work pools that a prefect.yaml names, of type process, where there are none; returns their names."""
    deployments = yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"]
    names = sorted({deployment["work_pool"]["name"] for deployment in deployments})
    template = ProcessWorker.get_default_base_job_template()
    with SyncPrefectClient(api) as client:
        for name in names:
            try:
                client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
            except ObjectAlreadyExists:
                continue
    return names


def fill_in_date(api: str, day: str) -> None:
    """Let the form of `nightly` come with a day filled in."""
    with SyncPrefectClient(api) as client:
        found = client.read_deployment_by_name("nightly/nightly")
        client.update_deployment(found.id, DeploymentUpdate(parameters={**found.parameters, "date": day}))


def are_online(api: str, pools: list[str]) -> bool:
    """Tell whether each pool has a worker that has been heard of lately."""
    with SyncPrefectClient(api) as client:
        return all(
            any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(pool))
            for pool in pools
        )


def names(api: str) -> list[str]:
    """Return the deployments of a server as flow/deployment."""
    with SyncPrefectClient(api) as client:
        flows = {flow.id: flow.name for flow in client.read_flows()}
        return sorted(f"{flows[one.flow_id]}/{one.name}" for one in client.read_deployments())
