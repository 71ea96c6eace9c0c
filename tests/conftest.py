"""What all tests share: no telemetry, no network, UTC, seeded, and no file outside the test's own folder."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gr_core.registry import database

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
def one_empty_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make MLflow's empty database once, by its fifty migrations, and copy it into every home made in this process."""
    real, kept = database.build, tmp_path_factory.mktemp("database") / "made.db"

    def build(folder: Path, artifact_root: str) -> Path:
        if not kept.exists():
            shutil.copyfile(real(folder, "/none"), kept)
        made = Path(shutil.copyfile(kept, folder / "copy.db"))
        location = f"{database.location(artifact_root)}/0"
        with contextlib.closing(sqlite3.connect(made)) as connection, connection:
            connection.execute("UPDATE experiments SET artifact_location = ?", (location,))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "build", build)
        yield
