"""Nights that nobody ran, before the scheduled one: in order, each from the champion as the one before left it (case A10).

After days of downtime a worker finds several late runs, in whatever order their slots come free; a server that was down
has scheduled none at all. So it is the home's journal that says which nights are missing, and each scheduled run takes
up all of them before its own. The runs that are late find their night finished, or running, and end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import date as Date

from gr_core.config import Config
from gr_core.errors import DataContractError
from gr_core.stages import outcome

logger = logging.getLogger("gr_core.flows")


def catch_up(settings: Config, home: str, day: Date, run: Callable[[Date], object]) -> list[Date]:
    """Run the nights that are missing before a scheduled one, oldest first.

    A day whose raw data is refused is told and left out: later days do not wait for a delivery that may never come. Any
    other failure is the scheduled night's too.

    Args:
        settings: The run's config: `nightly.catch_up_days`.
        home: URI of the home.
        day: The scheduled night's day.
        run: Runs the night of a day.

    Returns:
        The days that were run.
    """
    if settings.source.world is not None:
        return []  # its days are not the calendar's
    missing, dropped = outcome.missed_days(home, day, settings.nightly.catch_up_days)
    if dropped:
        logger.warning(
            "no night ran for %s to %s (%d days), and nightly.catch_up_days is %d: they are left out; `daybreak backfill` "
            "can run them before this night",
            dropped[0],
            dropped[-1],
            len(dropped),
            settings.nightly.catch_up_days,
        )
    done = []
    for missed in missing:
        if outcome.finished(home, missed.isoformat()) is not None:
            continue  # another late run was faster
        logger.info("night %s has not run; it comes before %s", missed, day)
        try:
            run(missed)
        except DataContractError as error:
            logger.warning("night %s cannot run, and %s does not wait for it: %s", missed, day, error.message)
            continue
        done.append(missed)
    return done
