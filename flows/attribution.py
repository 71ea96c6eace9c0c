"""The attribution flow: where training's time goes, on the newest finished night's pack; order and parameters only."""

from __future__ import annotations

from typing import Any

from prefect import flow

from gr_core.config import load_config
from gr_core.environment import home_uri, prepare_tools
from tasks.attribution import attribute, path_of, publish


@flow(name="attribution")
def attribution(
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
    steps: int = 20,
    baseline: bool = False,  # noqa: FBT001, FBT002 -- a check box of the form
    trace: str | None = None,
) -> dict[str, Any]:
    """Measure training steps, publish where their time goes and what would make them cheaper; trains and saves nothing.

    Args:
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.
        steps: Steps to measure.
        baseline: Measure the naive settings beside it, on the same pack.
        trace: File on the worker that two further steps are recorded in, for chrome://tracing; empty: none.

    Returns:
        The object of `daybreak attribute --json`.
    """
    settings = load_config(config, overrides)
    where = home_uri(settings.name, home)
    prepare_tools(where)
    found: dict[str, Any] = attribute(settings, where, steps=steps, baseline=baseline, trace=path_of(trace))
    publish(found, key="attribution", about=f"config {settings.name}")
    if found["baseline"] is not None:
        publish(found["baseline"], key="attribution-naive", about=f"config {settings.name} with naive settings")
    return found
