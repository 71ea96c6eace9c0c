"""Where the buckets of a stage run: threads of the flow's process, or a Ray cluster through prefect-ray.

One machine is the default. With `--runner ray` the same tasks are mapped over the buckets on Ray workers, which write
to the home themselves (a shared file system, or s3://); only refs travel. A worker that dies loses nothing: Ray runs its
bucket again, and stages are idempotent.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from prefect import Task
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from gr_core.environment import child_variables
from gr_core.errors import UsageError

logger = logging.getLogger("gr_core.flows")

Runner = Literal["threads", "ray"]
CRASHES = 3  # times that a bucket whose worker died is run again
OBJECT_STORE_BYTES = 128 * 2**20  # only refs travel


class MapBuckets(Protocol):
    """Runs a task once a bucket and returns the results in bucket order."""

    def __call__(self, task: Task[..., Any], *arguments: Any) -> list[Any]:
        """Run the task for each bucket; takes its arguments as Task.map does, raises what the first failing one raised."""


def in_threads(task: Task[..., Any], *arguments: Any) -> list[Any]:
    """Map buckets on the flow's own task runner."""
    return list(task.map(*arguments).result())


@contextmanager
def bucket_runner(runner: Runner) -> Iterator[MapBuckets]:
    """Yield what maps buckets.

    Args:
        runner: threads; or ray: the cluster that RAY_ADDRESS names, else one for the block, on this machine.

    Raises:
        UsageError: ray is asked for and not installed.
    """
    if runner == "threads":
        yield in_threads
        return
    try:
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options
    except ImportError as error:
        raise UsageError(
            "--runner ray needs the optional packages ray and prefect-ray: pip install -e '.[ray]' in the checkout",
            where="runner",
        ) from error
    with get_client(sync_client=True) as client:
        # without it each worker would start a Prefect server of its own
        api = str(client.api_url)
    with (
        temporary_settings({PREFECT_API_URL: api}),
        RayTaskRunner(init_kwargs=_settings(api)) as cluster,
        remote_options(max_retries=CRASHES),
    ):
        resources: Any = ray.cluster_resources  # not typed
        logger.info("buckets run on Ray, %d CPUs", int(resources().get("CPU", 0)))

        def on_ray(task: Task[..., Any], *arguments: Any) -> list[Any]:
            named = inspect.signature(task.fn).bind(*arguments).arguments
            futures: Any = cluster.map(task, named)
            return list(futures.result())

        yield on_ray


def _settings(api: str) -> dict[str, Any]:
    """Return the arguments of ray.init: workers report to the flow's Prefect server, and find our code and storage."""
    variables = {name: value for name, value in child_variables().items() if _travels(name)}
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": {**variables, "PREFECT_API_URL": api}},
        "log_to_driver": False,
        "configure_logging": False,  # ours stands
    }
    if "RAY_ADDRESS" not in os.environ:
        settings |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    return settings


def _travels(name: str) -> bool:
    """Tell whether a worker needs a variable of the flow's environment: paths, storage, our own and Prefect's settings."""
    return name.startswith(("AWS_", "DAYBREAK_", "PREFECT_", "MLFLOW_", "POLARS_", "OMP_")) or name in (
        "DO_NOT_TRACK",
        "PYTHONPATH",
    )
