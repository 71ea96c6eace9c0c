"""What the journal alone tells: finished nights, the status object, the next day. Loads neither torch nor MLflow."""

from __future__ import annotations

from datetime import date as Date
from datetime import timedelta
from typing import Any

from gr_core import progress
from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import Journal, nights
from gr_core.report.running import forecast, under_way
from gr_core.report.status import Promise, build_status, night_object


def opened(home: str, key: str) -> bool:
    """Tell whether a night was ever opened; reads the journal alone."""
    return key in nights(Journal(store.join(home, "lake", "journal")).entries())


def finished(home: str, key: str) -> dict[str, Any] | None:
    """Return a finished night's object, or None when it has not finished; reads the journal alone."""
    record = nights(Journal(store.join(home, "lake", "journal")).entries()).get(key)
    return night_object(record) if record is not None and record.is_finished else None


def status(
    config: Config, home: str, today: Date, *, now_us: int, running: str | None = None, retraining: str | None = None
) -> dict[str, Any]:
    """Return the object of `daybreak status --json`.

    Args:
        config: The run's config.
        home: URI of the home.
        today: Today in the lake's zone.
        now_us: The moment it is asked, microseconds since the epoch.
        running: Key of the night that a live process works on.
        retraining: Key of the full retrain that a live process works on.
    """
    entries = Journal(store.join(home, "lake", "journal")).entries()
    promise = promised(config, now_us)
    seen: dict[str, Any] = {"running": running, "retraining": retraining}
    calendar = None if config.source.world else today  # an embedded world's days are not the calendar's
    stale_days = config.alerts.stale_champion_days
    found = build_status(entries, today=calendar, stale_days=stale_days, promise=promise, **seen)
    told = progress.read(home, running) if running is not None else None
    if told is not None:
        found["nights"] = [
            under_way(night, told, now_us) if night["state"] == "running" and not night.get("windows") else night
            for night in found["nights"]
        ]
    if promise is not None:
        records = list(nights(entries).values())
        late = forecast(records, today - timedelta(days=1), promise, told)
        found["findings"] += [late] if late is not None else []
    return found


def promised(config: Config, now_us: int) -> Promise | None:
    """Return when the config wants nights to be done (nightly.ready_by); None: it does not say, or days are a world's."""
    if not config.nightly.ready_by or config.source.world is not None:
        return None
    return Promise(ready_by=config.nightly.ready_by, zone=config.lake.zone, now_us=now_us)


def expected(config: Config, home: str, day: Date, *, now_us: int) -> dict[str, str] | None:
    """Return the finding that a night of a day, were it to start now, would miss `nightly.ready_by`; None: it would not."""
    promise = promised(config, now_us)
    if promise is None:
        return None
    records = list(nights(Journal(store.join(home, "lake", "journal")).entries()).values())
    return forecast(records, day, promise, {})


def next_day(config: Config, home: str) -> Date:
    """Return the day after the newest night, the newest itself while it is unfinished, or the world's first day.

    Raises:
        UsageError: There is no night yet, and the source is no embedded world.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries())
    plain = [record for key, record in records.items() if key == record.date]
    started = [record for record in plain if not record.is_prepared]  # an experiment may look further ahead
    if plain:
        newest = max(started or plain, key=lambda record: record.date)
        return Date.fromisoformat(newest.date) + timedelta(days=int(newest.is_finished))
    if config.source.world is None:
        raise UsageError("--next needs a night to count from; run the first with --date YYYY-MM-DD", where="next")
    return config.source.world.start


def missed_days(home: str, day: Date, limit: int) -> tuple[list[Date], list[Date]]:
    """Find the days after the newest finished night, or from the oldest unfinished one on, whose night has not finished.

    Args:
        home: URI of the home.
        day: Days before this one.
        limit: At most so many of the newest of them are to be run.

    Returns:
        Those to run and those left out, each oldest first.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries()).values()
    main = {Date.fromisoformat(record.date): record for record in records if record.is_main}
    finished = [one for one, record in main.items() if record.is_finished]
    begun = [max(finished) + timedelta(days=1)] if finished else [min(main)] if main else []
    if not begun:
        return [], []
    missing = [begun[0] + timedelta(days=n) for n in range(max((day - begun[0]).days, 0))]
    kept = max(len(missing) - limit, 0)
    return missing[kept:], missing[:kept]
