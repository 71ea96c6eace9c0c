"""One Prefect server for all flow tests, in a temporary folder; nights of the test's own process train and score in it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import databases
from tests.beside import score_here, train_here

_server = contextlib.ExitStack()


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Start Prefect's ephemeral server on a temporary database, once; it ends with the last flow test of this process."""
    from prefect.testing import utilities

    def seeded() -> str:
        folder = Path(tempfile.mkdtemp())  # the harness removes it
        databases.prefect(folder).rename(folder / "prefect-test.db")  # what the harness calls it
        return str(folder)

    with _server:
        patch = _server.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(utilities, "mkdtemp", seeded)
        _server.enter_context(utilities.prefect_test_harness(server_startup_timeout=120))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """End the server before other folders' tests: idle, it takes a tenth of a core."""
    yield
    if nextitem is not None and not nextitem.path.is_relative_to(Path(__file__).parent):
        _server.close()


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Train and score here, where a night runs in this process: eight seconds a night less.

    Children are tested in gr_core/stages, and in all flow tests whose nights are processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        score_here(patch)
        yield
