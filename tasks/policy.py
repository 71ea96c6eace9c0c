"""What all tasks share: retry only what is transient, log what gr_core says and bad input in one line, cache nothing.

Idempotence is ours (gr_core.night.run_stage): Prefect's cache cannot see the code below a thin wrapper.
"""

from __future__ import annotations

import logging
from typing import Any

from gr_core.errors import CommitConflict, DaybreakError, StoreUnavailable

RETRIES = 2
RETRY_DELAYS: list[float] = [5, 60]

# PREFECT_LOGGING_EXTRA_LOGGERS attaches Prefect's handlers to these loggers, but sets no level.
for _name in ("gr_core", "kernels"):
    logging.getLogger(_name).setLevel(logging.INFO)

BAD_INPUT = 2  # the exit status of errors whose message says all: what is wrong, where, and what to do


def without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback off a line about bad input; a fault of ours, or of a machine, keeps it (and DEBUG keeps all)."""
    error = record.exc_info[1] if record.exc_info else None
    shown = logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
    if isinstance(error, DaybreakError) and error.exit_code == BAD_INPUT and not shown:
        record.exc_info = record.exc_text = None
    return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):  # where Prefect tells what ended a run
    logging.getLogger(_name).addFilter(without_traceback)


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """Tell Prefect whether a failed task is worth a retry: storage silent, or commits lost to other writers."""
    try:
        state.result()
    except (StoreUnavailable, CommitConflict):
        return True
    except BaseException:  # noqa: BLE001 -- whatever else it was, trying again would not mend it
        return False
    return False
