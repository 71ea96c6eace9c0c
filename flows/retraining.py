"""The command that trains a new lineage: `daybreak full-retrain`. Prefect is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flows import options
from flows.running import prepare
from gr_core.config import Config
from gr_core.lake import store
from gr_core.lake.lock import RETRAIN_LOCK, running_night


def full_retrain(asked: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    """Run a full retrain through a day, or what is missing of it; returns its object as a night of example 7."""
    from gr_core.config_rules import check_rivals
    from gr_core.lake.journal import Journal, nights
    from gr_core.retrain import check_through, retrain_key
    from gr_core.stages import outcome

    key = retrain_key(asked.through)
    done = outcome.finished(home, key)
    if done is not None:
        sys.stderr.write(f"full retrain {key} is finished ({done['state']}, {done['gate']}); nothing to do\n")
        return done, options.exit_status(done)
    holder = running_night(home, watch=True, name=RETRAIN_LOCK)
    if holder == key:
        told = f"full retrain {key} is already running; this start ends"
        sys.stderr.write(told + "\n")
        return {"date": key, "state": "running", "reasons": [told]}, options.DONE
    entries = Journal(store.join(home, "lake", "journal")).entries()
    check_rivals(settings, entries)
    if key not in nights(entries):
        check_through(settings, home, asked.through, entries, running=holder)  # which the flow waits for
    prepare(home)
    from flows.full_retrain import full_retrain as flow

    same: dict[str, Any] = {"config": asked.config, "home": home, "overrides": asked.set}
    status: Any = flow(through=asked.through, runner=asked.runner, **same)
    return dict(status), options.exit_status(dict(status))


def add_commands(commands: options.Commands[Any], common: argparse.ArgumentParser) -> None:
    """Add the command and its options to those of `daybreak`; `common` are the options that all commands take."""
    anew = commands.add_parser(
        "full-retrain",
        parents=[common],
        allow_abbrev=False,
        help="train a new lineage over all days, beside nights, and let the gate judge it",
    )
    anew.add_argument("--through", type=options.day, required=True, help="last lake day YYYY-MM-DD of its first pass")
    options.add_runner(anew)
    anew.set_defaults(run=full_retrain, names_home=True)
