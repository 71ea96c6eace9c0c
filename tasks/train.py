"""Training of the challenger. Policy and a progress bar; the body is gr_core.stages.training.train."""

import logging
import time
from typing import Any, cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from gr_core import progress
from gr_core.night import Night
from gr_core.stages import training
from tasks.policy import RETRIES, RETRY_DELAYS, is_transient

logger = logging.getLogger("gr_core.train")

SECONDS_BETWEEN_UPDATES = 2.0
SECONDS_BETWEEN_LINES = 5.0


class ProgressArtifact:
    """Shows the child's progress lines as a Prefect progress artifact and, now and then, as a log line."""

    def __init__(self, night: Night) -> None:
        self._night = night
        # Prefect types this as sync or async; called from a thread it is sync.
        self._id = cast("UUID", create_progress_artifact(0.0, key="training", description=f"training of {night.key}"))
        self._updated = self._logged = time.monotonic()

    def __call__(self, line: dict[str, Any]) -> None:
        """Take one progress line: step, steps, loss."""
        now = time.monotonic()
        done = 100.0 * line["step"] / max(line["steps"], 1)
        if now - self._updated >= SECONDS_BETWEEN_UPDATES or line["step"] == line["steps"]:
            progress.step(self._night.home, self._night.key, line["step"], line["steps"])
            update_progress_artifact(self._id, progress=done)
            self._updated = now
        if now - self._logged >= SECONDS_BETWEEN_LINES:
            logger.info("step %d of this night's %d, loss %.4f", line["step"], line["steps"], line["loss"])
            self._logged = now

    def finish(self) -> None:
        """Show the bar full: also where a finished training was reused and said nothing."""
        update_progress_artifact(self._id, progress=100.0)


def train_with_progress(night: Night, packs: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """Train the challenger and show its progress in the Prefect UI."""
    artifact = ProgressArtifact(night)
    result = training.train(night, packs, words, artifact)
    artifact.finish()
    return result


train = task(
    name="train",
    task_run_name="train",
    tags={"gpu"},
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
)(train_with_progress)
