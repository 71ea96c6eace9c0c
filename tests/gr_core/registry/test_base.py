"""What every ModelStore does, on the one in memory and on MLflow; and the helpers they share."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from gr_core.errors import FormatError, UsageError
from gr_core.registry.base import InMemoryStore, ModelStore, as_float, check_files, clean_metrics
from gr_core.registry.mlflow_store import MlflowStore


@pytest.fixture(scope="module", params=["memory", "mlflow"])
def store(request) -> ModelStore:
    if request.param == "memory":
        return InMemoryStore()
    home = request.getfixturevalue("mlflow_home")
    return MlflowStore(f"sqlite:///{home}/mlflow.db", str(home / "mlartifacts"), "contract")


def test_a_night_has_one_run_for_ever(store):
    """A retry of a night gets the run it had, whatever it was ended as; children likewise."""
    first = store.start_night("2025-06-01", params={"lr": 0.1}, tags={"date": "2025-06-01"})
    child = store.child(first, "train")
    store.finish(first, "FAILED")

    assert store.start_night("2025-06-01", params={"lr": 0.1}, tags={}) == first
    assert store.child(first, "train") == child
    assert store.child(first, "evaluate") != child
    assert store.start_night("2025-06-02", params={}, tags={}) != first


def test_a_file_is_put_beside_a_run_that_has_ended(store):
    """The run stays as it ended; a night without one is refused by name."""
    run = store.start_night("2025-07-01", params={}, tags={})
    store.finish(run, "FINISHED")

    store.attach("2025-07-01", "page.html", "first")
    store.attach("2025-07-01", "page.html", "again é")

    if isinstance(store, InMemoryStore):
        found, status = store.runs[run].files["page.html"], store.runs[run].status
    else:
        info = MlflowClient(tracking_uri=store.tracking_uri).get_run(run).info
        found = (Path(info.artifact_uri.removeprefix("file://")) / "page.html").read_text(encoding="utf-8")
        status = info.status
    assert (found, status) == ("again é", "FINISHED")
    with pytest.raises(UsageError, match="2025-07-02 has no run"):
        store.attach("2025-07-02", "page.html", "text")


def test_a_changed_parameter_does_not_stop_a_retry(store):
    """Case B4: the same night with another learning rate goes on in its run; nothing raises."""
    run = store.start_night("2025-06-03", params={"lr": 0.1, "seed": 0}, tags={})

    assert store.start_night("2025-06-03", params={"lr": 0.2, "seed": 0, "new": 1}, tags={}) == run


def test_registering_again_gives_the_same_version(store, trained):
    """One version per night and checkpoint digest; another night of the same checkpoint is another version."""
    run = store.start_night("2025-06-04", params={}, tags={})
    first = store.register(run, trained.checkpoint, night="2025-06-04", tags={"date": "2025-06-04"})
    again = store.register(run, trained.checkpoint, night="2025-06-04", tags={"date": "2025-06-04"})
    other = store.register(run, trained.checkpoint, night="2025-06-05", tags={"date": "2025-06-05"})
    state = json.loads((trained.checkpoint / "state.json").read_text())

    assert type(first) is int
    assert again == first
    assert other == first + 1
    found = store.version(first)
    assert (found.night, found.digest, found.tags, found.run) == (
        "2025-06-04",
        state["digest"],
        {"date": "2025-06-04"},
        run,
    )


def test_aliases_follow_the_journal(store, trained):
    """Case B1: aliases are read from the model itself; repair sets what differs, removes what is gone."""
    run = store.start_night("2025-06-06", params={}, tags={})
    one, two, three = (store.register(run, trained.checkpoint, night=f"2025-07-0{n}", tags={}) for n in range(1, 4))

    assert store.repair(champion=two, previous=one, challenger=three) == {
        "champion": two,
        "previous": one,
        "challenger": three,
    }
    assert store.aliases() == {"champion": two, "previous": one, "challenger": three}
    assert store.repair(champion=two, previous=one, challenger=three) == {}
    assert store.repair(champion=one, previous=None, challenger=three) == {"champion": one, "previous": None}
    assert store.aliases() == {"champion": one, "challenger": three}


def test_what_is_not_there_is_named(store, tmp_path: Path):
    """An unknown version and a folder that is no complete checkpoint are refused with what to look at."""
    run = store.start_night("2025-06-07", params={}, tags={})

    with pytest.raises(UsageError, match="no version 99"):
        store.version(99)
    with pytest.raises(UsageError, match="no version 99"):
        store.set_alias("champion", 99)
    with pytest.raises(FormatError, match=r"manifest\.json"):
        store.register(run, tmp_path, night="2025-06-07", tags={})


def test_memory_keeps_series():
    """Metrics of many steps are kept by step, the first word of each."""
    memory = InMemoryStore()
    run = memory.start_night("2025-06-01", params={}, tags={})

    memory.log_series(run, {2: {"ne": 0.5}, 1: {"ne": 0.25, "auc": None}})
    memory.log_series(run, {2: {"ne": 0.75}})

    assert memory.runs[run].series == {"ne": {1: 0.25, 2: 0.5}}


def test_memory_keeps_what_is_logged():
    """The in-memory store is open to tests: statuses, parameters, tags, metrics and datasets."""
    store = InMemoryStore()
    run = store.start_night("n", params={"lr": 0.1}, tags={"mode": "nightly"})
    store.start_night("n", params={"lr": 0.2}, tags={})
    child = store.child(run, "train")
    store.log(run, {"a": np.float32(0.5), "b": math.nan, "c": None})
    store.log_dataset(run, "/events", {"delta_version": 1}, {"read": 2})
    store.finish(run, "KILLED")

    assert (store.runs[run].params, store.runs[run].tags) == (
        {"lr": "0.1"},
        {"mode": "nightly", "changed/lr": "0.2", "nan": "b"},
    )
    assert store.runs[run].metrics["a"] == 0.5
    assert (store.runs[run].status, store.runs[child].status) == ("KILLED", "KILLED")
    assert store.runs[run].datasets == [{"table": "/events", "bound": {"delta_version": 1}, "rows": {"read": 2}}]
    assert store.link(run) == "memory:memory/n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2.0),
        (torch.tensor(0.25), 0.25),
        (True, 1.0),
        (np.bool_(False), 0.0),
        (3, 3.0),
    ],
    ids=["numpy", "torch int", "torch float", "bool", "numpy bool", "int"],
)
def test_scalars_of_any_kind_are_floats(value, expected):
    """Case B15: numpy, torch 0-d and bool become floats."""
    found = as_float(value)

    assert (type(found), found) == (float, expected)


def test_what_is_no_scalar_is_refused():
    """None is left out, NaN is named, and text or a vector is a fault of ours."""
    assert clean_metrics({"a": None, "b": np.nan, "c": 1})[1] == ["b"]
    assert "a" not in clean_metrics({"a": None})[0]
    for wrong in ("0.5", np.zeros(2), torch.zeros(2)):
        with pytest.raises(TypeError, match="scalar"):
            as_float(wrong)


def test_a_registered_model_comes_back_whole_or_is_refused(store, trained, tmp_path):
    """What is downloaded is the checkpoint file by file; a version that is not there, or whose files were dropped, is named."""
    run = store.start_night("2025-08-01", params={}, tags={})
    version = store.register(run, trained.checkpoint, night="2025-08-01", tags={})

    model = store.download(version, tmp_path / "model")
    assert check_files(model, trained.checkpoint) == store.version(version).digest
    store.drop_model(version, {"pruned": "a test"})
    with pytest.raises(FormatError, match="is not there"):
        store.download(version, tmp_path / "again")
    with pytest.raises(UsageError, match="no version 99"):
        store.download(99, tmp_path / "never")
