"""One Prefect server for all flow tests, in a temporary folder; nights of the test's own process train and score in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import databases
from tests.beside import score_here, train_here


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Start Prefect's ephemeral server on a temporary database, once."""
    from prefect.testing import utilities

    def seeded() -> str:
        folder = Path(tempfile.mkdtemp())  # the harness removes it
        databases.prefect(folder).rename(folder / "prefect-test.db")  # what the harness calls it
        return str(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", seeded)
        with utilities.prefect_test_harness(server_startup_timeout=120):
            yield


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Train and score here, where a night runs in this process: eight seconds a night less.

    Children are tested in gr_core/stages, and in all flow tests whose nights are processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        score_here(patch)
        yield
