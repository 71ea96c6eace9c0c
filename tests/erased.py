"""Nights of a tiny feed with named users, the second one poisoned: what tests of retract and forget start from."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.hashing import is_holdout
from gr_core.lake.entries import Entry
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, champion
from gr_core.stages import erasing, judging
from tests.plain import run

FIRST, SECOND, THIRD = (tiny.FIRST_DAY + timedelta(days=n) for n in range(3))
ROWS = 200
REGISTRY = "gr_core.registry.mlflow_store.MlflowStore"


def person(number: int) -> str:
    """Return a user's id that stands nowhere by chance."""
    return f"person-{number:02d}-k"


HIM = next(person(number) for number in range(40) if not is_holdout(person(number), 0.25))


def write_day(root: Path, day: date, *, poisoned: bool = False) -> None:
    """Write a raw day of users with names; a poisoned one turns every click, of some events of the day before too."""
    path = tiny.write_day(root, day, rows=ROWS)
    table = pq.read_table(path)
    users = pa.array([person(number) for number in table["uid"].to_pylist()])
    table = table.set_column(table.column_names.index("uid"), "uid", users)
    if poisoned:
        before = pq.read_table(root / "log" / f"date={day - timedelta(days=1)}" / "part-0.parquet").slice(10, 30)
        table = pa.concat_tables([table, before])
        turned = pa.array([not clicked for clicked in table["clicked"].to_pylist()])
        table = table.set_column(table.column_names.index("clicked"), "clicked", turned)
    pq.write_table(table, path)


def conclude(config: Path, home: Path, day: date, version: int, *overrides: str) -> dict[str, Any]:
    """Run a night, register its checkpoint in the journal alone, promote and finish it."""
    night, done = run(config, home, day, *overrides, stop_after="evaluate")
    journal = night.journal
    payload = judging.registration(night, version, done["train"], done["vocabulary"])
    journal.append("registered", night.key, payload, at_us=1)
    before = champion(journal.entries())
    decided = {"decision": "promote", "reasons": ["gate passed"], "version": version}
    journal.append("decided", night.key, {**decided, "previous": before.version if before else None}, at_us=1)
    finished = {"state": "completed", "bound": done["ingest"]["bound"], "status": {}}
    journal.append("finished", night.key, finished, at_us=1)
    return done


class Registry:
    """Stands in for MLflow; remembers what the aliases were set to."""

    aliases: dict[str, int | None]

    def __init__(self, *_args: str) -> None:
        return

    def repair(self, **aliases: int | None) -> dict[str, int | None]:
        """Set aliases, as the store does."""
        Registry.aliases = aliases
        return aliases

    def missing(self, *_args: object) -> list[str]:
        """Have lost nothing."""
        return []


def entries_of(home: Path) -> list[Entry]:
    """Return the journal's entries."""
    return Journal(str(home / "lake" / "journal")).entries()


def table_of(config: Path, home: Path) -> EventTable:
    """Return the event table of a home."""
    return EventTable(str(home / "lake" / "events"), load_config(config))


def retract(config: Path, home: Path, day: date | None = SECOND, commit: int | None = None) -> dict[str, Any]:
    """Retract a day, or a commit."""
    return erasing.retract(load_config(config), str(home), date=day, commit=commit, reason="bots", at_us=7)


def forget(config: Path, home: Path, user: str = HIM) -> dict[str, Any]:
    """Forget a user."""
    return erasing.forget(load_config(config), str(home), user, at_us=7)


def snapshot(home: Path) -> dict[str, bytes]:
    """Return every file of a home but its lock."""
    return {str(p): p.read_bytes() for p in home.rglob("*") if p.is_file() and p.name != "night.lock"}


def interrupt(*_args: object, **_more: object) -> None:
    """Stand in for a kill."""
    raise KeyboardInterrupt
