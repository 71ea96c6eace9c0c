"""The registry with its artifacts on S3: a broken upload leaves no version, and refusals are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3.s3.inject
import pytest

from gr_core.errors import ConfigError, StoreUnavailable
from gr_core.lake import store
from gr_core.registry.mlflow_store import MlflowStore
from tests.s3 import KEY_ID, TOKEN, bucket, forget_clients, point_at, refusing, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own


def open_store(folder: Path, root: str, name: str) -> MlflowStore:
    """Open a registry whose database is local and whose artifacts are not."""
    return MlflowStore(f"sqlite:///{folder}/mlflow.db", store.join(root, "mlflow", "artifacts"), name)


def fail_upload(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Break off the n-th upload of a file."""
    real, sent = boto3.s3.inject.upload_file, []

    def upload_file(self: Any, Filename: str, Bucket: str, Key: str, **more: Any) -> Any:
        sent.append(Key)
        if len(sent) == place:
            raise ConnectionResetError("connection reset by peer")
        return real(self, Filename=Filename, Bucket=Bucket, Key=Key, **more)

    monkeypatch.setattr(boto3.s3.inject, "upload_file", upload_file)
    forget_clients(monkeypatch)


def test_a_broken_upload_leaves_no_version(
    bucket: str, trained: Any, mlflow_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second artifact fails: no version, no alias; the next try registers the whole model as version 1 (case B5)."""
    models = open_store(mlflow_home, f"{bucket}/home", "broken")
    run = models.start_night("2025-06-01", params={}, tags={})
    with monkeypatch.context() as broken:
        fail_upload(broken, 2)
        with pytest.raises(StoreUnavailable, match=r"did not answer .*reset by peer"):
            models.register(run, trained.checkpoint, night="2025-06-01", tags={})
    assert models.aliases() == {}
    assert not models._search({"daybreak.night": "2025-06-01"})

    forget_clients(monkeypatch)
    assert models.register(run, trained.checkpoint, night="2025-06-01", tags={}) == 1
    assert models.version(1).source.startswith(f"{bucket}/home/mlflow/artifacts/")
    there = {one.name.rpartition("/")[2] for one in store.listing(models.version(1).source)}
    assert {"MLmodel", "manifest.json", "state.json"} <= there


def test_refused_credentials_are_named(
    trained: Any, mlflow_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's own client meets an expired token: the error says so, and neither it nor a log shows the token."""
    with refusing("ExpiredToken", 400) as endpoint:
        point_at(endpoint, monkeypatch)
        models = open_store(mlflow_home, "s3://shop/home", "refused")
        run = models.start_night("2025-06-01", params={}, tags={})
        with pytest.raises(ConfigError, match=r"bucket shop: the credentials have expired \(ExpiredToken\)") as caught:
            models.register(run, trained.checkpoint, night="2025-06-01", tags={})

    assert not [word for word in (KEY_ID, TOKEN) if word in str(caught.value) + caplog.text]
