"""One Prefect server for all flow tests, in a temporary folder; nights of the test's own process train and score in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beside import score_here, train_here


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Start Prefect's ephemeral server on a temporary database, once."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
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
