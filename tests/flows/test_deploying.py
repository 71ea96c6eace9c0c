"""prefect.yaml made out for one config and home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tests.tiny as tiny
from flows import deploying
from gr_core.config import load_config

ROOT = Path(__file__).parent.parent.parent


def rendered(config: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the deployments by name, as `up` deploys them."""
    target = folder / "prefect.yaml"
    deploying.render(ROOT / "prefect.yaml", target, load_config(str(config), []), str(config), "/home/one")
    return {one["name"]: one for one in yaml.safe_load(target.read_text())["deployments"]}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return a feed's config and its deployments."""
    folder = tmp_path_factory.mktemp("deploying")
    config = tiny.make(folder, days=0)
    return config, rendered(config, folder)


def test_every_deployment_runs_the_config_in_the_home(ours: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """Nothing but the parameters is changed: pools, variables, limits and the schedule are those of prefect.yaml."""
    config, deployments = ours
    told = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert deployments.keys() == told.keys()
    for name, deployment in deployments.items():
        assert deployment["parameters"]["config"] == str(config)
        assert deployment["parameters"]["home"] == "/home/one"
        assert {**deployment, "parameters": None} == {**told[name], "parameters": None}
    assert "active" not in deployments["nightly"]["schedules"][0]


def test_an_embedded_worlds_schedule_is_not_active(tmp_path: Path) -> None:
    """Its days are not the calendar's, so it waits for clicks; the schedule is there to be switched on."""
    nightly = rendered(ROOT / "conf" / "world.toml", tmp_path)["nightly"]
    assert nightly["parameters"]["config"] == "conf/world.toml"
    (schedule,) = nightly["schedules"]
    assert schedule["cron"] == "30 4 * * *"
    assert schedule["active"] is False
