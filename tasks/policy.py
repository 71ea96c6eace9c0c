"""What all tasks share: retry only what is transient, log what gr_core says, cache nothing.

Idempotence is ours (gr_core.night.run_stage): Prefect's cache cannot see the code below a thin wrapper.
"""

from __future__ import annotations

import logging
from typing import Any

from gr_core.errors import CommitConflict, StoreUnavailable

RETRIES = 2
RETRY_DELAYS: list[float] = [5, 60]

# PREFECT_LOGGING_EXTRA_LOGGERS attaches Prefect's handlers to these loggers, but sets no level.
for _name in ("gr_core", "kernels"):
    logging.getLogger(_name).setLevel(logging.INFO)


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """Tell Prefect whether a failed task is worth a retry: storage silent, or commits lost to other writers."""
    try:
        state.result()
    except (StoreUnavailable, CommitConflict):
        return True
    except BaseException:  # noqa: BLE001 -- whatever else it was, trying again would not mend it
        return False
    return False
