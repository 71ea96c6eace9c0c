"""The registry on MLflow itself: where it writes, what a run holds, and what a fresh process loads."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient

from gr_core.errors import FormatError
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.registry.scorer import RequestScorer

LOAD = """
import json, sys
import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/daybreak-world@champion")
found = model.predict(pandas.read_parquet(sys.argv[2]))
import gr_core
print(json.dumps({"scores": {c: [list(map(float, s)) for s in found[c]] for c in found if c != "request_id"},
                  "code": gr_core.__file__, "ids": list(found["request_id"]),
                  "input": model.metadata.get_input_schema().input_names()}))
"""


@pytest.fixture(scope="module")
def home(mlflow_home) -> Path:
    return mlflow_home


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work in an empty directory with an empty HOME: whatever appears there was written astray."""
    there = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        patch.setenv("HOME", str(there))
        yield there


def open_store(home: Path) -> MlflowStore:
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "world")


@pytest.fixture(scope="module")
def store(home, elsewhere) -> MlflowStore:
    return open_store(home)


@pytest.fixture(scope="module")
def client(home, store) -> MlflowClient:
    return MlflowClient(tracking_uri=store.tracking_uri, registry_uri=store.tracking_uri)


@pytest.fixture(scope="module")
def registered(store, trained) -> int:
    run = store.start_night("2025-06-01", params={}, tags={"date": "2025-06-01"})
    version = store.register(run, trained.checkpoint, night="2025-06-01", tags={"date": "2025-06-01"})
    store.repair(champion=version, previous=None, challenger=version)
    return version


def test_one_database_at_the_configured_place(home, elsewhere, store, registered, client, tmp_path, monkeypatch):
    """Case B6: from two working directories, both runs in one SQLite file; nothing beside it, nothing in HOME."""
    monkeypatch.chdir(tmp_path)
    open_store(home).start_night("2025-06-02", params={}, tags={})
    experiment = client.get_experiment_by_name("daybreak-world")

    names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    assert {"2025-06-01", "2025-06-02"} <= names
    assert list(tmp_path.iterdir()) == list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["mlartifacts", "mlflow.db"]


def test_a_search_for_versions_knows_no_aliases(client, store, registered):
    """Case B1: MLflow's search leaves aliases out, so the store asks for the model."""
    assert [list(found.aliases) for found in client.search_model_versions("name = 'daybreak-world'")] == [[]]
    assert store.aliases() == {"champion": registered, "challenger": registered}


def test_a_fresh_process_elsewhere_loads_the_champion(trained, store, registered, requests, tmp_path):
    """Cases B9, B14: without pickle and without our code on the path, logits equal to 1e-5, lists of any lengths."""
    asked = [
        {**requests[0], "candidates": ["i1", "i2", "i3"], "candidate_kind": ["k1", None, "k3"]},
        {**requests[1], "history": requests[1]["history"][:2]},
        {**requests[2], "history": None},
    ]
    pd.DataFrame(asked).to_parquet(tmp_path / "requests.parquet")
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, store.tracking_uri, "requests.parquet"],
        cwd=tmp_path,
        env={**environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = RequestScorer(trained.checkpoint).score(asked)

    assert "mlartifacts" in found["code"]
    assert found["ids"] == [request["request_id"] for request in asked]
    assert [len(scores) for scores in found["scores"]["scores_click"]] == [3, 1, 1]
    for name, scores in expected.items():
        np.testing.assert_allclose(np.concatenate(found["scores"][name]), np.concatenate(scores), atol=1e-5)
    assert {"history", "candidates", "shown_at", "surface", "candidate_kind"} <= set(found["input"])


def test_the_model_is_safetensors_and_json(home, registered):
    """Nothing in the artifacts needs unpickling; an input example and pinned requirements stand beside the weights."""
    files = [path for path in (home / "mlartifacts").rglob("*") if path.is_file()]
    suffixes = {path.suffix for path in files}
    requirements = next(path for path in files if path.name == "requirements.txt").read_text().split()

    assert suffixes <= {".safetensors", ".json", ".arrow", ".py", ".txt", ".yaml", ".html", ""}
    assert {"input_example.json", "manifest.json", "MLmodel"} <= {path.name for path in files}
    assert f"torch=={torch.__version__.partition('+')[0]}" in requirements


def test_a_run_holds_what_was_logged_once(store, client, home):
    """Cases B15, G14: scalars of any kind as floats, NaN flagged; logging again adds no second value."""
    run = store.start_night("2025-06-03", params={"train.lr": 0.1}, tags={"mode": "nightly"})
    values = {"next_day/auc/click": np.float32(0.75), "perf/tokens": torch.tensor(7), "ok": True, "ne": math.nan}
    for _ in range(2):
        store.log(run, {**values, "undefined": None})
        store.log_dataset(run, "/lake/events", {"commit": 3, "delta_version": 5}, {"read": 10})
    again = store.start_night("2025-06-03", params={"train.lr": 0.2}, tags={})
    found = client.get_run(again)

    assert found.data.metrics.keys() == values.keys()
    assert found.data.metrics["next_day/auc/click"] == 0.75
    assert len(client.get_metric_history(run, "perf/tokens")) == 1
    assert found.data.params == {"train.lr": "0.1"}
    assert {
        "daybreak.nan": "ne",
        "daybreak.mode": "nightly",
        "daybreak.changed/train.lr": "0.2",
    }.items() <= found.data.tags.items()
    assert len(found.inputs.dataset_inputs) == 1
    dataset = found.inputs.dataset_inputs[0].dataset
    assert json.loads(dataset.source) == {"path": "/lake/events", "delta_table_version": 5}
    assert json.loads(dataset.profile) == {"bound": {"commit": 3, "delta_version": 5}, "rows": {"read": 10}}
    assert store.link(run).startswith(f"sqlite:///{home}/mlflow.db#/experiments/")


def test_a_dataset_of_any_size_is_recorded_without_its_rows(store, client):
    """Case B13: table, Delta version, bound and counts of ten million rows, of a table that nobody opens, in seconds."""
    run = store.start_night("2025-06-21", params={}, tags={})
    bound = {"commit": 3, "delta_version": 5, "cutoff": "2025-06-22T00:00:00Z"}
    started = time.process_time()
    store.log_dataset(run, "s3://nowhere/lake/events", bound, {"read": 10_000_000, "committed": 9_999_999})

    assert time.process_time() - started < 5.0
    (recorded,) = client.get_run(run).inputs.dataset_inputs
    assert json.loads(recorded.dataset.source) == {"path": "s3://nowhere/lake/events", "delta_table_version": 5}
    assert json.loads(recorded.dataset.profile) == {
        "bound": bound,
        "rows": {"read": 10_000_000, "committed": 9_999_999},
    }


def test_a_series_is_logged_once_at_its_steps(store, client):
    """Metrics of many steps stand at their steps; logged again, by a retry that knows more, nothing stands twice."""
    run = store.child(store.start_night("2025-06-20", params={}, tags={}), "evaluate")
    first = {20: {"holdout/ne/click": 0.75, "holdout/auc/click": None}, 10: {"holdout/ne/click": 0.5}}

    store.log_series(run, first)
    store.log_series(run, {**first, 30: {"holdout/ne/click": math.nan}})
    store.log_series(run, {})

    history = client.get_metric_history(run, "holdout/ne/click")
    points = sorted((point.step, point.value) for point in history)
    assert points[:2] == [(10, 0.5), (20, 0.75)]
    assert len(points) == 3
    assert math.isnan(points[2][1])
    found = client.get_run(run).data
    assert "holdout/auc/click" not in found.metrics
    assert found.tags["daybreak.nan"] == "holdout/ne/click"


def test_runs_end_once_and_dead_ones_are_killed(store, client):
    """Cases B2, B12: children end with their night, a re-opened run runs again, a dead one is never FINISHED."""
    run = store.start_night("2025-06-04", params={}, tags={})
    child = store.child(run, "train")
    store.finish(run, "FAILED")
    states = [client.get_run(key).info.status for key in (run, child)]
    store.start_night("2025-06-04", params={}, tags={})
    reopened = client.get_run(run).info
    store.start_night("2025-06-05", params={}, tags={})

    assert states == ["FAILED", "FAILED"]
    assert reopened.status == "RUNNING"
    assert "2025-06-04" in store.close_dead(keep="2025-06-05")
    assert client.get_run(run).info.status == "KILLED"
    assert client.get_run(run).info.end_time > client.get_run(child).info.end_time


def test_a_failed_upload_leaves_no_version(store, trained, monkeypatch):
    """Case B5: an upload that breaks off, or arrives damaged, makes no version; the next attempt succeeds."""
    run = store.start_night("2025-06-06", params={}, tags={})
    upload = store._client.log_model_artifacts
    before = store._client.search_model_versions("name = 'daybreak-world'")

    def broken(model_id, local_dir):
        raise OSError("connection reset")

    def damaged(model_id, local_dir):
        next(Path(local_dir).rglob("*.safetensors")).write_bytes(b"half")
        upload(model_id, local_dir)

    for fault, error in ((broken, OSError), (damaged, FormatError)):
        monkeypatch.setattr(store._client, "log_model_artifacts", fault)
        with pytest.raises(error, match=r"reset|damaged"):
            store.register(run, trained.checkpoint, night="2025-06-06", tags={})
    assert len(store._client.search_model_versions("name = 'daybreak-world'")) == len(before)

    monkeypatch.setattr(store._client, "log_model_artifacts", upload)
    assert store.register(run, trained.checkpoint, night="2025-06-06", tags={}) == len(before) + 1
