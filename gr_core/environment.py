"""The one place that reads and sets environment variables."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path

from gr_core.errors import UsageError
from gr_core.lake import uris

_CACHE_GIB = 50.0
# Bounded, so that a dead endpoint is named in seconds (the libraries' own: up to three minutes)
CONNECT_SECONDS = 5
READ_SECONDS = 20  # without a byte
REQUEST_SECONDS = 60  # a whole request of deltalake or Polars, its body included
RETRIES = 2
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_SHORTEST_SECRET = 4  # characters: a shorter value would take innocent text with it


def home_uri(name: str, given: str | None = None) -> str:
    """Return the home of a config: `given` (--home), else DAYBREAK_HOME, else .daybreak/<name>; local ones absolute.

    Raises:
        UsageError: Neither a local path nor s3://bucket/prefix.
    """
    home = given or os.environ.get("DAYBREAK_HOME") or f".daybreak/{name}"
    if uris.is_local(home):
        return str(uris.local_path(home))
    bucket, key = uris.split_remote(home)
    return f"s3://{bucket}/{key}".rstrip("/")


def state_root() -> Path:
    """Return the local folder for what homes on s3:// keep beside them: DAYBREAK_STATE, else .daybreak."""
    return Path(os.environ.get("DAYBREAK_STATE") or ".daybreak").absolute()


def state_directory(home: str) -> Path:
    """Return a home's folder for local state (Prefect's, MLflow's database, work files): itself where it is local."""
    if uris.is_local(home):
        return uris.local_path(home)
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", home.removeprefix("s3://"))[-40:].strip("-.")
    return state_root() / f"{plain}-{hashlib.sha256(home.encode()).hexdigest()[:8]}"


def cache_directory() -> Path:
    """Return the local folder of downloaded copies."""
    return state_root() / "cache"


def cache_bytes() -> int:
    """Return how many bytes of copies are kept: DAYBREAK_CACHE_GIB, else 50 GiB."""
    text = os.environ.get("DAYBREAK_CACHE_GIB") or str(_CACHE_GIB)
    try:
        return int(float(text) * 2**30)
    except ValueError:
        raise UsageError(
            f"DAYBREAK_CACHE_GIB is a number of GiB, got {text!r}; correct it", where="DAYBREAK_CACHE_GIB"
        ) from None


def storage_options(uri: str) -> dict[str, str] | None:
    """Return what deltalake needs for an object store beyond AWS_* (which it reads itself); None for local paths.

    Sets AWS_ALLOW_HTTP for an endpoint without TLS, since Polars reads that from the environment alone.
    """
    if uris.is_local(uri):
        return None
    options = {
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "timeout": f"{REQUEST_SECONDS}s",
        "max_retries": str(RETRIES),
        "retry_timeout": f"{REQUEST_SECONDS}s",
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["aws_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = os.environ["AWS_ALLOW_HTTP"] = "true"
    return options


def scan_options(uri: str) -> dict[str, str | int] | None:
    """Return the same for Polars, whose retries are numbers; pass them to scan_delta beside the table's own."""
    options = storage_options(uri)
    return None if options is None else {**options, "max_retries": RETRIES, "retry_timeout_ms": 1000 * REQUEST_SECONDS}


def store_identity() -> str:
    """Return a digest of all settings of the object store, so that a client is not used beyond a change of them."""
    values = sorted((key, value) for key, value in os.environ.items() if key.startswith("AWS_"))
    return hashlib.sha256(repr(values).encode()).hexdigest()


def without_secrets(text: str) -> str:
    """Return a text with the environment's credentials struck out."""
    for key in _SECRETS:
        value = os.environ.get(key, "")
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


def tracking_uri(home: str) -> str:
    """Return MLflow's tracking URI: MLFLOW_TRACKING_URI, else one SQLite file in the home's local state (case B6)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or own_database(home)


def own_database(home: str) -> str:
    """Return the URI of the home's own SQLite file for MLflow."""
    return f"sqlite:///{state_directory(home)}/mlflow.db"


_SERVERS = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")


def servers_given() -> dict[str, str]:
    """Return the variables that name servers for nights to report to, as far as they are set."""
    return {name: os.environ[name] for name in _SERVERS if os.environ.get(name)}


def use_servers(prefect_api: str, mlflow: str) -> None:
    """Let nights report to these servers; what is already set in the environment stands."""
    for name, url in zip(_SERVERS, (prefect_api, mlflow), strict=True):
        os.environ.setdefault(name, url)


def artifact_root(home: str) -> str:
    """Return where MLflow keeps artifacts when the home's own database is used."""
    return uris.join(home, "mlartifacts") if uris.is_local(home) else uris.join(home, "mlflow", "artifacts")


KEPT_MEMORY = {
    # glibc's malloc, mallopt(3): what a step frees the next one takes again, instead of pages that the system zeroes anew.
    # Measured on two cores, a step of 8,192 tokens at width 64: 3,741 page faults to 37, 110.6 to 106.7 ms.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


def child_variables() -> dict[str, str]:
    """Return the environment of a child process that imports gr_core, whatever its working directory."""
    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**KEPT_MEMORY, **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def loading_variables() -> dict[str, str]:
    """Return the environment of a process that loads a registered model: none of our code but the model's, no pickle."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept = [path for path in paths if not (Path(path) / "gr_core").is_dir()]
    fixed = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**KEPT_MEMORY, **os.environ, **fixed, "PYTHONPATH": os.pathsep.join(kept)}


def prepare_tools(home: str) -> str:
    """Set what Prefect, MLflow and torch.compile read: state in the home (beside it where remote), logs of ours, no telemetry.

    Whatever is already set in the environment stands, so a team's own servers are used.

    Returns:
        PREFECT_HOME.

    Raises:
        UsageError: A home that cannot be written to, or whose path Delta cannot hold; or a home on s3:// without the
            library that MLflow writes there with.
    """
    uris.delta_uri(home)  # refuses a home that Delta cannot hold, before anything is made in it
    state = state_directory(home) / "prefect"
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "gr_core,kernels",
        "PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY": "true",  # `schedules: []` leaves none (case A13)
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # we also log outside flow runs
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # beside a server it would stand before the object of --json
        "GIT_PYTHON_REFRESH": "quiet",
        # Scoring shares the cores with training: spinning OpenMP threads cost it a factor of 14 (measured, 2 cores).
        "OMP_WAIT_POLICY": "passive",
        "PREFECT_HOME": str(state),
        # Compiled kernels, by content: written beside and renamed, so that processes and nights share them.
        "TORCHINDUCTOR_CACHE_DIR": str(state.with_name("compiled")),
    }
    if not uris.is_local(home):
        _need_boto3(home)
        defaults["DAYBREAK_STATE"] = str(state_root())  # the same for child processes in other folders
        defaults |= {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": str(RETRIES + 1)}  # MLflow's client
    with uris.writable(home if uris.is_local(home) else str(state)):
        state.mkdir(parents=True, exist_ok=True)
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    return os.environ["PREFECT_HOME"]


def _need_boto3(home: str) -> None:
    server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://"))
    if not server and importlib.util.find_spec("boto3") is None:
        raise UsageError(
            f"{home}: MLflow keeps artifacts on s3:// with boto3, which is not installed; pip install -e '.[s3]' in the "
            "checkout, or set MLFLOW_TRACKING_URI to a server that serves artifacts",
            where=home,
        )


def variable(name: str) -> str | None:
    """Return an environment variable that a config names (the key of `source.pseudonymise_users`); None: not set."""
    return os.environ.get(name)
