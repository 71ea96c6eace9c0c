"""A real Prefect server and a real worker, each a process of its own, driven over HTTP as the UI drives them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import databases

ROOT = Path(__file__).parent.parent
PATIENCE = 200.0  # seconds; a busy machine takes a minute for what takes an idle one five seconds

POOL = "cpu"


def until(said: Callable[[], Any], *, seconds: float = PATIENCE, what: str = "it") -> Any:
    """Wait until a condition holds; returns its first true value."""
    deadline = time.monotonic() + seconds
    while not (found := said()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)
    return found


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Stand:
    """A server, its pool and the workers started here; `variables` is the environment of whoever talks to it.

    Args:
        folder: Where database and logs lie.
        settings: Further variables of the server.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.api = f"http://127.0.0.1:{free_port()}/api"
        apart = ("PREFECT_HOME", "PREFECT_API_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
        kept = {key: value for key, value in os.environ.items() if key not in apart}
        self.variables = {
            **kept,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(ROOT),
            **settings,
        }
        databases.prefect(folder / "prefect")
        self._started: list[subprocess.Popen[bytes]] = []

    def prefect(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a `prefect` command to its end."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        return subprocess.run(command, cwd=ROOT, env=self.variables, capture_output=True, text=True, check=False)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a `prefect` command and leave it running."""
        with (self.folder / f"{words[0]}-{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *words],
                cwd=ROOT,
                env={**self.variables, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def serve(self) -> None:
        """Start the server and wait until it answers."""
        import httpx

        port = self.api.removesuffix("/api").rpartition(":")[2]
        self.start("server", "start", "--host", "127.0.0.1", "--port", port)

        def healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.api}/health").status_code == 200
            return False

        until(healthy, what="the server")

    def work(self) -> subprocess.Popen[bytes]:
        """Start a worker of the pool."""
        return self.start("worker", "start", "--pool", POOL, "--type", "process", "--name", uuid.uuid4().hex[:8])

    def close(self) -> None:
        """End all that was started here, with what those started; newest first."""
        for process in reversed(self._started):
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                    break

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Yield Prefect's client of this server."""
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: self.api}), get_client(sync_client=True) as client:
            yield client

    def deploy(self, flow: Any, **options: Any) -> uuid.UUID:
        """Deploy a flow by its module to the pool; returns the deployment's id."""
        from prefect.deployments.runner import EntrypointType
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: self.api}):
            made = flow.to_deployment(
                entrypoint_type=EntrypointType.MODULE_PATH,
                work_pool_name=POOL,
                job_variables={"working_dir": str(self.folder)},
                **options,
            )
            return uuid.UUID(str(made.apply()))

    def state_of(self, run: uuid.UUID) -> Any:
        """Return a flow run's state."""
        with self.client() as client:
            return client.read_flow_run(run).state

    def cancel(self, run: uuid.UUID) -> None:
        """Ask for a run's end as the UI's Cancel does."""
        from prefect.states import Cancelling

        with self.client() as client:
            client.set_flow_run_state(run, Cancelling())

    def ended(self, run: uuid.UUID) -> Any:
        """Wait for a run's final state and return it."""
        return until(lambda: (state := self.state_of(run)).is_final() and state, what=f"the end of run {run}")
