"""Telling people of a night through the Prefect notification block that `alerts.block` names.

Any block of Prefect's will do: Slack, Teams, PagerDuty, e-mail, a webhook of one's own. `status` shows the same without
any; a block that cannot be loaded or does not answer is a line in the log and never fails a night.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import date as Date
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block

from gr_core import environment
from gr_core.alerts_config import Alert
from gr_core.config import Config
from gr_core.stages import outcome

logger = logging.getLogger("gr_core.flows")


def tell(settings: Config, kind: Alert, subject: str, body: str) -> bool:
    """Send one message where the config wants it; returns whether it was sent.

    Args:
        settings: The run's config: `alerts`.
        kind: What it is about; `alerts.on` lists the kinds that are wanted.
        subject: One line.
        body: What happened, and what to do.
    """
    slug = settings.alerts.block
    if slug is None or kind not in settings.alerts.on:
        return False
    try:
        block = Block.load(slug)
        if not isinstance(block, NotificationBlock):
            raise TypeError(f"block {slug} sends no notifications; name one that does, such as slack-webhook/on-call")
        sent: Any = block.notify(body, subject)  # typed as sync or async; here it is sync
        del sent
    except Exception as error:  # noqa: BLE001 -- a night is never failed by what tells of it
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        logger.warning("alerts.block %s was not told '%s': %s", slug, subject, told)
        return False
    return True


def telling(settings: Config, home: str, day: Date, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a night, and tell before it that it will be late, after it that it failed or was held, or of a stale champion.

    A night that an operator stops is no failure: nobody is told.

    Args:
        settings: The run's config.
        home: URI of the home, whose lock is held.
        day: The lake day.
        run: Runs the night and returns its object; one that has finished already tells nothing.
    """
    name = f"daybreak {settings.name}"
    settled = outcome.finished(home, day.isoformat()) is not None
    late = None if settled else outcome.expected(settings, home, day, now_us=_now_us())
    if late is not None:
        logger.warning("%s", late["message"])
        tell(settings, "late", f"{name}: night {day} will be late", late["message"])
    try:
        night = run()
    except Exception as error:
        told = environment.without_secrets(f"{type(error).__name__}: {error}")
        tell(
            settings,
            "failed",
            f"{name}: night {day} failed",
            f"{told}\nSee `daybreak status`; then run the night again.",
        )
        raise
    if settled:
        return night
    if night["gate"] == "held":
        tell(settings, "held", f"{name}: night {day} was held", "; ".join(night["reasons"]))
    today = datetime.now(ZoneInfo(settings.lake.zone)).date()
    found = outcome.status(settings, home, today, now_us=_now_us())["findings"]
    for stale in (one for one in found if one["where"] == "champion"):
        tell(settings, "stale", f"{name}: the champion is stale", stale["message"])
    return night


def _now_us() -> int:
    return round(datetime.now(ZoneInfo("UTC")).timestamp() * 1e6)
