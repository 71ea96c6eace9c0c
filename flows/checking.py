"""The `check` command: what a night of a day would make of its raw files. Prefect is not needed."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from gr_core.config import Config

OK, NOT_OK = 0, 2


def check(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Check a day (default: yesterday in the lake's zone, of an embedded world its next); exit status 2 when not ok."""
    from gr_core.stages import checking, outcome

    day = options.date
    if day is None and settings.source.world is not None:
        day = outcome.next_day(settings, home)
    if day is None:
        day = datetime.now(ZoneInfo(settings.lake.zone)).date() - timedelta(days=1)
    value = checking.check(settings, home, day)
    return value, OK if value["ok"] else NOT_OK
