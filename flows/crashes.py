"""Flow runs that a kill left behind: Prefect shows them as running for ever, where their worker was killed too (case A5).

While a flow run holds a home's lock it is on record in the home (`flow-runs/`). Whoever takes the lock next finds what a
dead holder left there, and only a dead one's: its flow run is marked Crashed, which also gives back the deployment's
concurrency slot. A run that ended by itself has no record, however long its process takes to go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from gr_core.config import Config
from gr_core.errors import DamagedFile
from gr_core.lake import store
from gr_core.stages import projecting

logger = logging.getLogger("gr_core.flows")

FOLDER = "flow-runs"
SAID = "its process was killed; the next start in this home found its record"


@contextmanager
def on_record(home: str, folder: str = FOLDER, settings: Config | None = None) -> Iterator[None]:
    """Keep the current flow run on record for the block, and mark those that dead holders of the lock left as Crashed.

    Args:
        home: URI of the home, whose lock is held.
        folder: Where holders of that lock are on record.
        settings: The config, where the lock is that of nights: once the block has ended, MLflow's runs that the dead
            left running are ended as well, also where this start failed before it trained (case B2).
    """
    folder, own = store.join(home, folder), flow_run.id
    dead = store.listing(folder)
    for left in dead:
        if (name := left.name.removesuffix(".json")) != own:  # else killed, and started again as the same run
            _crash(name, _root(left.uri))
            store.remove(left.uri)
    record = store.join(folder, f"{own}.json") if own is not None else None
    if record is not None:
        store.write_json(record, {"root": flow_run.root_flow_run_id})
    try:
        yield
    finally:
        if dead and settings is not None:
            projecting.end_dead(settings, home)
        if record is not None:
            store.remove(record)


def _root(uri: str) -> str:
    """Return the run that a left run was part of; "" where its record does not say, or is damaged."""
    try:
        return str(store.read_json(uri).get("root") or "")
    except (DamagedFile, AttributeError) as error:
        logger.warning("the record of a flow run is passed over: %s", error)
        return ""


def _crash(run: str, root: str) -> None:
    """Mark a dead run, and the run that it was part of, unless they have ended or another server knows them."""
    for name in dict.fromkeys((run, root)):
        try:
            with get_client(sync_client=True) as client:
                found = client.read_flow_run(UUID(name))
                if found.state is None or found.state.is_final():
                    continue
                state: State[Any] = Crashed(message=SAID)
                client.set_flow_run_state(found.id, state, force=True)
        except (ObjectNotFound, ValueError):
            continue
        logger.warning("flow run %s was killed by something; it is marked Crashed", found.name)
