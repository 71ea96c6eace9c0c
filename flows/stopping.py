"""What a night does when it ends by an error or is stopped: nothing of it goes on once its lock is free."""

from __future__ import annotations

import contextlib
import logging

from prefect.context import FlowRunContext
from prefect.task_runners import ThreadPoolTaskRunner

from gr_core.night import Night
from gr_core.stages import children, judging, projecting

logger = logging.getLogger("gr_core.flows")


def give_up(night: Night, error: BaseException) -> None:
    """End what a night still runs, then write down that its attempt failed or was cancelled.

    A cancelled or interrupted night (no Exception) ends its training at once: within seconds no process of it is left,
    and the checkpoints that it saved whole are what the next attempt goes on from. After a failure of one stage the
    others that run are waited for, so that their work is kept.

    Args:
        night: The night, whose lock is held.
        error: What ended it.
    """
    stopped = not isinstance(error, Exception)
    with children.ended() if stopped else contextlib.nullcontext(0) as ended:
        if ended:
            logger.warning("night %s is stopped: its training was ended", night.key)
        judging.fail(night, error)
        context = FlowRunContext.get()
        if context is not None and isinstance(context.task_runner, ThreadPoolTaskRunner):
            context.task_runner.cancel_all()  # waits for tasks that run, so that none writes beside the next attempt
    projecting.conclude(night, "KILLED" if stopped else "FAILED")
