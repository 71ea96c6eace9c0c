"""One Prefect server for all flow tests, in a temporary folder; registered models are scored in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beside import score_here


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Start Prefect's ephemeral server on a temporary database, once."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module", autouse=True)
def scored_here() -> Iterator[None]:
    """Let the gates of nights that run in this process score here: five seconds a night less (see stages/test_served)."""
    with pytest.MonkeyPatch.context() as patch:
        score_here(patch)
        yield
