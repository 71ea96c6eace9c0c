"""Empty databases of Prefect and MLflow, made once a test run by their hundred migrations, and copied from then on.

Each costs a process four seconds. Nights that start with nothing at all are in test_contention and test_up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gr_core.registry import database

VARIABLE = "DAYBREAK_TESTS_DATABASES"
"""Names the folder in which they are kept; it is the same in all processes of a test run."""
_build_mlflow = database.build


def prefect(folder: Path) -> Path:
    """Copy Prefect's into a PREFECT_HOME, as prefect.db."""

    def make(file: Path) -> None:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_API")}
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        subprocess.run(
            command, env={**variables, "PREFECT_HOME": str(file.parent)}, check=True, stdout=subprocess.DEVNULL
        )
        _vacuum(file.parent / "prefect.db", file)

    return _copy("prefect", make, folder / "prefect.db")


def mlflow(folder: Path, artifact_root: str) -> Path:
    """Copy MLflow's into a folder, for artifacts in this place; stands for `gr_core.registry.database.build`."""
    made = _copy("mlflow", lambda file: _vacuum(_build_mlflow(file.parent, "/none"), file), folder / "copy.db")
    with contextlib.closing(sqlite3.connect(made)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ?", (f"{database.location(artifact_root)}/0",))
    return made


def _copy(name: str, make: Callable[[Path], None], target: Path) -> Path:
    folder = Path(os.environ[VARIABLE]) / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kept").exists():
            make(folder / "new")
            (folder / "new").rename(folder / "kept")
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(folder / "kept", target))


def _vacuum(made: Path, file: Path) -> None:
    file.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(made)) as connection:
        connection.execute("VACUUM INTO ?", (str(file),))  # one file, without a journal beside it
