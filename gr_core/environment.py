"""The one place that reads and sets environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from gr_core.lake import store


def home_uri(name: str, given: str | None = None) -> str:
    """Return the home of a config: `given` (--home), else DAYBREAK_HOME, else .daybreak/<name>; local ones absolute."""
    home = given or os.environ.get("DAYBREAK_HOME") or f".daybreak/{name}"
    return str(store.local_path(home)) if store.is_local(home) else home.rstrip("/")


def tracking_uri(home: str) -> str:
    """Return MLflow's tracking URI: MLFLOW_TRACKING_URI, else one SQLite file in the home (case B6)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.local_path(home)}/mlflow.db"


def artifact_root(home: str) -> str:
    """Return where MLflow keeps artifacts when the home's own database is used."""
    return store.join(home, "mlartifacts")


def child_variables() -> dict[str, str]:
    """Return the environment of a child process that imports gr_core, whatever its working directory."""
    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def prepare_tools(home: str) -> str:
    """Set what Prefect and MLflow read at import: state in the home, logs of ours, no telemetry.

    Whatever is already set in the environment stands, so a team's own servers are used.

    Returns:
        PREFECT_HOME; empty where none is set.

    Raises:
        UsageError: A home that cannot be written to, or whose path Delta cannot hold.
    """
    store.delta_uri(home)  # refuses a home that Delta cannot hold, before anything is made in it
    state = store.local_path(home) / "prefect" if store.is_local(home) else None
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "gr_core,kernels",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # we also log outside flow runs
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        # Scoring shares the cores with training: spinning OpenMP threads cost it a factor of 14 (measured, 2 cores).
        "OMP_WAIT_POLICY": "passive",
    }
    if state is not None:
        with store.writable(home):
            state.mkdir(parents=True, exist_ok=True)
        defaults["PREFECT_HOME"] = str(state)
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    return os.environ.get("PREFECT_HOME", "")


def variable(name: str) -> str | None:
    """Return an environment variable that a config names (the key of `source.pseudonymise_users`); None: not set."""
    return os.environ.get(name)
