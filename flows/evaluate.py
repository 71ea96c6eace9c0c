"""The evaluate flow: a model on the new events of a finished night; order and parameters only."""

from __future__ import annotations

from datetime import date as Date
from typing import Any

from prefect import flow

from gr_core.config import load_config
from gr_core.environment import home_uri, prepare_tools
from tasks.evaluation import evaluate_model, publish_evaluation


@flow(name="evaluate", flow_run_name="evaluate {model}")
def evaluate(
    model: str = "champion",
    date: Date | None = None,
    config: str = "conf/world.toml",
    home: str | None = None,
    overrides: list[str] = [],  # noqa: B006 -- Prefect copies parameters
) -> dict[str, Any]:
    """Score a model on the new events of a finished night, as that night would have; trains, moves and decides nothing.

    Args:
        model: champion, challenger or previous; a version's number; or path or URI of a checkpoint.
        date: The lake day; empty: that of the newest finished night.
        config: Path of the TOML config.
        home: URI of the home; empty: DAYBREAK_HOME, else .daybreak/ and the name of the config.
        overrides: Config overrides, each dotted.key=value.

    Returns:
        The object of `daybreak evaluate --json`.
    """
    settings = load_config(config, overrides)
    where = home_uri(settings.name, home)
    prepare_tools(where)
    found: dict[str, Any] = evaluate_model(settings, where, model, date)
    publish_evaluation(found)
    return found
