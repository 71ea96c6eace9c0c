"""What all tests share: no telemetry, no network, UTC, seeded, and no file outside the test's own folder."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gr_core.registry import database
from tests import databases

os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["TZ"] = "UTC"
# Kernels run in Python, except for `pytest -m gpu`; kernels.check compiles them in processes of its own.
os.environ.setdefault("TRITON_INTERPRET", "0" if ("-m", "gpu") in itertools.pairwise(sys.argv) else "1")
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # else Triton warns that this default will change
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="daybreak-tests-prefect-")  # never the user's own
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("DAYBREAK_HOME", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def root() -> Path:
    """Return the repository's root."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def empty_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a place for the empty databases of tests.databases, and copy MLflow's into every home made in this process."""
    base = tmp_path_factory.getbasetemp()
    kept = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # all workers of one run share it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(databases.VARIABLE, str(kept / "databases"))
        patch.setattr(database, "build", databases.mlflow)
        yield
