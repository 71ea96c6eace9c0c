"""A night with another block, head and attention path than the defaults, from its config to the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.tiny as tiny
from gr_core.lake import store
from tests.plain import run

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
OVERRIDES = ("model.block=hstu", "model.head=mmoe", "attention.path=dense")


def test_block_head_and_path_of_the_config_are_what_trains_scores_and_is_registered(tmp_path: Path) -> None:
    """The checkpoint has HSTU's and MMoE's tensors, the gate scored it, and the kernel stands in state and MLflow."""
    from mlflow.tracking import MlflowClient

    home = tmp_path / "home"

    _, done = run(tiny.make(tmp_path, days=1), home, tiny.FIRST_DAY, *OVERRIDES)

    state = store.read_json(store.join(done["train"]["uri"], "state.json"))
    assert state["attention"] == done["train"]["attention"] == "dense"
    assert (state["config"]["model"]["block"], state["config"]["model"]["head"]) == ("hstu", "mmoe")
    assert done["register"]["version"] == 1
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    tags = {found.info.run_name: found.data.tags for found in client.search_runs(experiments)}
    assert tags["train"]["daybreak.attention"] == "dense"
