"""The promotion flow: an operator's `promote` or `rollback` from a form; parameters only."""

from __future__ import annotations

import time
from typing import Any, Literal

from prefect import flow

from gr_core.config import load_config
from gr_core.environment import home_uri, prepare_tools
from gr_core.errors import UsageError
from tasks.promotion import move, publish

Action = Literal["promote", "rollback"]


def promotion_name() -> str:
    """Name a run by what it does, as in `promote 7`."""
    from prefect.runtime import flow_run

    asked = flow_run.parameters
    version = asked.get("version")
    return f"{asked.get('action')} {version}" if version is not None else str(asked.get("action"))


@flow(name="promotion", flow_run_name=promotion_name)
def promotion(
    action: Action,
    reason: str,
    version: int | None = None,
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
) -> dict[str, Any]:
    """Move the champion outside the gate: promote a registered version, or roll back to an earlier champion.

    Args:
        action: promote makes the version the champion; rollback goes back to an earlier champion.
        reason: Why, for those who read the status later.
        version: To promote: which version. To roll back: which earlier champion; empty: the one before.
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.

    Returns:
        The object of `daybreak promote --json`: champion, previous.
    """
    if action == "promote" and version is None:
        raise UsageError("promote needs a version; `daybreak status` shows them", where="version")
    settings = load_config(config, overrides)
    where = home_uri(settings.name, home)
    prepare_tools(where)
    value: dict[str, Any] = move(
        settings, where, action=action, version=version, reason=reason, at_us=round(time.time() * 1e6)
    )
    publish(value, action=action, reason=reason)
    return value
