"""The environment of a command: what its tools are told before they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOLD = """
import json, sys
from gr_core.environment import prepare_tools
prepare_tools(sys.argv[1])
from mlflow.entities import Run, RunData, RunInfo
from mlflow.store.tracking.rest_store import RestStore
from mlflow.tracking._tracking_service.client import TrackingServiceClient
info = RunInfo("r", "1", "u", "FINISHED", 0, 1, "active", run_name="night")
RestStore.get_run = lambda self, run: Run(info, RunData())
client = TrackingServiceClient("http://127.0.0.1:9")
print(json.dumps({"store": type(client.store).__name__}))
client._log_url("r")
"""


def test_mlflow_beside_a_server_prints_nothing(tmp_path: Path) -> None:
    """With --json stdout is one object; MLflow would print where a run is as it ends, once its store is a server."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    words = [sys.executable, "-c", TOLD, str(tmp_path / "home")]
    told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    assert json.loads(told) == {"store": "RestStore"}
