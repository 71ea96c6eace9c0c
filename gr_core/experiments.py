"""Experiments: another config on a night's own pins, data and packs; a model to look at, never one to go on from.

An experiment is set beside one night: it has that night's parent, cutoff and ingestion, and whatever of the stages up to
packs its config would make the same. It has a key, a folder, a run and a version of its own; no alias points at that
version, no night starts from it, and the night's own state stays as it was. Where the night has not been run yet, it is
opened and its stages up to packs are run; for everything else it counts as not run until a start of its own.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from datetime import date as Date
from typing import Any

from gr_core.config import Config, parse_config
from gr_core.config_rules import check_lake, config_difference, refuse_full_retrain, trained_with
from gr_core.errors import ConfigError, UsageError
from gr_core.lake import store
from gr_core.lake.journal import Entry, Journal, NightRecord, nights
from gr_core.lake.lineage import Lineage
from gr_core.lake.pruned import refuse_night
from gr_core.night import Night, night_key, open_night

logger = logging.getLogger(__name__)

SHARED_SECTIONS = ("name", "lake", "source", "nightly")
"""Sections that an experiment has from its night: both read one ingestion."""
DECIDING = ("sequences", "vocabulary", "pack", "model", "attention", "train", "evaluation", "gate")
"""Sections that make an experiment what it is."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHOWN = 5  # keys that a message names


def check_name(name: str) -> str:
    """Return an experiment's name, which becomes part of a folder's; UsageError where it cannot."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"an experiment's name is up to 64 letters, digits, dots, dashes and underscores, got {name!r}",
            where="experiment",
        )
    return name


def night_overrides(overrides: list[str]) -> list[str]:
    """Return those overrides of a config that the night of an experiment has too."""
    return [one for one in overrides if re.split(r"[.=]", one.strip(), maxsplit=1)[0] in SHARED_SECTIONS]


def pinned(record: NightRecord, home: str) -> Night:
    """Return a night as its last attempt had it; nothing is written."""
    values = {key: value for key, value in record.opened.items() if key in Night.__slots__}
    night = Night.from_json({**values, "parent": record.pinned_parent})
    return replace(night, home=home, config=config_of(record), finished=record.is_finished)


def config_of(record: NightRecord) -> dict[str, Any]:
    """Return the resolved config of a night's last attempt."""
    return dict(next(attempt["config"] for attempt in reversed(record.attempts) if "config" in attempt))


def refuse_other_settings(config: Config, home: str, key: str) -> None:
    """Refuse a finished experiment's name for other settings: the answer would be the old one's.

    Raises:
        UsageError: Names the keys that differ.
    """
    record = nights(Journal(store.join(home, "lake", "journal")).entries()).get(key)
    if record is None or not record.is_finished:
        return
    changed = changes(config_of(record), config.resolved())
    if changed:
        raise UsageError(
            f"experiment {record.experiment} of {record.date} is finished, with other settings ({told(changed)}, then "
            "and now); choose another name with --experiment",
            where="experiment",
        )


def changes(was: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Return {dotted.key: [was, now]} of what makes an experiment; a key that is newer than `was` had its default."""
    before, after = completed(was), completed(now)
    return config_difference({key: before.get(key) for key in DECIDING}, {key: after.get(key) for key in DECIDING})


def completed(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return an older release's resolved config with the keys that came since; as it is where that cannot be read."""
    try:
        return parse_config(resolved).resolved()
    except ConfigError:
        return resolved


def told(difference: dict[str, list[Any]]) -> str:
    """Return a config difference as one line: the first few keys with both values."""
    shown = [f"{key} {was!r} -> {now!r}" for key, (was, now) in list(difference.items())[:_SHOWN]]
    more = len(difference) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def open_experiment(
    config: Config,
    home: str,
    day: Date,
    name: str,
    *,
    plain: Config,
    at_us: int,
    parent_version: int | None = None,
) -> tuple[Night, Night]:
    """Pin an experiment by its night's pins, or take up the pins of its first attempt.

    Args:
        config: The experiment's config.
        home: URI of the home, whose lock is held.
        day: The lake day.
        name: The experiment's name.
        plain: The config that the night is opened with where it has not been run yet.
        at_us: The time of the journal entries, microseconds since the epoch.
        parent_version: The night is the separately named attempt that starts from this version.

    Returns:
        The night, as its last attempt had it, and the experiment.

    Raises:
        UsageError: No usable name; or the night was pruned, or its parent tainted by a retraction.
        ConfigError: Lake or source differ from the night's, or `model` or `vocabulary` from the parent's.
        BoundError: As `open_night`, for a night that has not been run yet.
    """
    key = night_key(day, parent_version, check_name(name))
    journal = Journal(store.join(home, "lake", "journal"))
    entries = journal.entries()
    check_lake(config, entries)
    record = nights(entries).get(night_key(day, parent_version))
    if record is None:
        night = open_night(plain, home, day, at_us=at_us, parent_version=parent_version, prepared_by=key)
        entries = journal.entries()
    else:
        night = replace(pinned(record, home), at_us=at_us)
    _check(config, night, entries)
    own = replace(
        night,
        key=key,
        config=config.resolved(),
        seed=config.pack.seed,
        experiment=name,
        beside=night.key,
        finished=False,
    )
    mine = nights(entries).get(key)
    if mine is not None and mine.is_finished:
        return night, replace(own, finished=True)
    difference = changes(night.config, own.config)
    payload: dict[str, Any] = {"fingerprint": config.fingerprint(), "difference": difference}
    if mine is None:
        journal.append("opened", key, {**payload, **own.to_json()}, at_us=at_us)
    else:
        # the night may have been pinned anew since, after a retraction
        own = replace(own, attempt=mine.num_attempts + 1)
        parent = own.parent.to_json() if own.parent else None
        journal.append("attempt", key, {**payload, "config": own.config, "parent": parent}, at_us=at_us)
    logger.info("experiment %s beside night %s: %s", name, night.key, told(difference) or "the night's own config")
    return night, own


def _check(config: Config, night: Night, entries: list[Entry]) -> None:
    """Refuse what could not be compared with the night, before anything is written."""
    refuse_night(entries, night.key, config.lake.rerun_days)
    changed = config_difference(_data(completed(night.config)), _data(config.resolved()))
    if changed:
        raise ConfigError(
            f"an experiment reads its night's ingestion, so lake and source are the night's: {told(changed)}; set them "
            "back",
            where=next(iter(changed)),
        )
    if night.parent is None:
        return
    if night.parent.version in Lineage.of(entries).tainted and not night.finished:
        raise UsageError(
            f"night {night.key} starts from version {night.parent.version}, which was tainted by a retraction; run the "
            "night first, then the experiment",
            where="experiment",
        )
    refuse_full_retrain(trained_with(entries, night.parent.version), config.resolved())


def _data(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that decides what is in the event table; where the files lie does not."""
    source = {key: value for key, value in resolved["source"].items() if key not in ("root", "checks")}
    return {"lake": resolved["lake"], "source": source}
