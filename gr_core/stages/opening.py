"""What a night of a day would do if it were started now, without starting it: refusals, stages, and who is running."""

from __future__ import annotations

from datetime import date as Date

from gr_core.config import Config
from gr_core.config_rules import check_lake, config_difference, refuse_full_retrain, trained_with
from gr_core.lake import store
from gr_core.lake.journal import Entry, Journal, nights
from gr_core.lake.lock import running_night
from gr_core.night import Night, check_parent, parent_of
from gr_core.refs import day_end_us
from gr_core.report.status import STAGES

# Sections of the config that a stage's output depends on; a stage runs again when one of them changed
_DEPENDS = {
    "sequences": ("sequences", "vocabulary", "model", "pack"),
    "pack": ("pack", "model"),
    "train": ("train", "model"),
    "gate": ("gate",),
}
_MANIFESTS = {"sequences": "sequences-00000", "pack": "pack-train"}


def refuse(config: Config, home: str, day: Date) -> None:
    """Refuse a config and a day as `open_night` does, without writing anything.

    Raises:
        ConfigError: `lake` differs from the home's, or `model` or `vocabulary` from the parent's.
        BoundError: The day, or its commit, lies before the champion's.
    """
    entries = Journal(store.join(home, "lake", "journal")).entries()
    check_lake(config, entries)
    record = nights(entries).get(day.isoformat())
    if record is not None:
        if not record.is_finished and record.parent_version is not None:
            refuse_full_retrain(trained_with(entries, record.parent_version), config.resolved())
        return
    night = Night(
        key=day.isoformat(),
        date=day.isoformat(),
        mode="nightly",
        home=home,
        config=config.resolved(),
        parent=parent_of(entries, None),
        cutoff_us=day_end_us(day, config.lake.zone),
        seed=config.pack.seed,
        at_us=0,
    )
    check_parent(config, night, entries)


def running(home: str, day: Date) -> str | None:
    """Say what a start of a day's night would meet: a night that runs in the home; None: nothing."""
    holder = running_night(home)
    if holder is None:
        return None
    if holder == day.isoformat():
        return f"night {day} is running in this home; another start of it ends at once"
    return f"{holder} is running in this home; a night of {day} waits until it is done"


def would_run(config: Config, home: str, day: Date, entries: list[Entry]) -> list[str]:
    """Return the stages that a night of this day would run: those without a manifest or with another config, and on."""
    record = nights(entries).get(day.isoformat())
    if (record is not None and record.is_finished) or running_night(home) == day.isoformat():
        return []
    if record is None:
        return list(STAGES)
    was = record.attempts[-1].get("config") or {}
    changed = {key.split(".")[0] for key in config_difference(was, config.resolved())}
    folder = store.join(home, "nights", record.key, "manifests")
    for place, stage in enumerate(STAGES):
        done = store.exists(store.join(folder, f"{_MANIFESTS.get(stage, stage)}.json"))
        if not done or changed & set(_DEPENDS.get(stage, ())):
            return list(STAGES[place:])
    return []
