"""What the journal alone tells: finished nights, the status object, the next day. Loads neither torch nor MLflow."""

from __future__ import annotations

from datetime import date as Date
from datetime import timedelta
from typing import Any

from gr_core.config import Config
from gr_core.errors import UsageError
from gr_core.lake import store
from gr_core.lake.journal import Journal, nights
from gr_core.report.status import STALE_DAYS, Promise, build_status, night_object


def opened(home: str, key: str) -> bool:
    """Tell whether a night was ever opened; reads the journal alone."""
    return key in nights(Journal(store.join(home, "lake", "journal")).entries())


def finished(home: str, key: str) -> dict[str, Any] | None:
    """Return a finished night's object, or None when it has not finished; reads the journal alone."""
    record = nights(Journal(store.join(home, "lake", "journal")).entries()).get(key)
    return night_object(record) if record is not None and record.is_finished else None


def status(config: Config, home: str, today: Date, *, now_us: int, running: str | None = None) -> dict[str, Any]:
    """Return the object of `daybreak status --json`.

    Args:
        config: The run's config.
        home: URI of the home.
        today: Today in the lake's zone.
        now_us: The moment it is asked, microseconds since the epoch.
        running: Key of the night that a live process works on.
    """
    entries = Journal(store.join(home, "lake", "journal")).entries()
    stale_days = None if config.source.world else STALE_DAYS  # an embedded world's days are not the calendar's
    promise = None
    if config.nightly.ready_by and config.source.world is None:
        promise = Promise(ready_by=config.nightly.ready_by, zone=config.lake.zone, now_us=now_us)
    return build_status(entries, today=today, running=running, stale_days=stale_days, promise=promise)


def next_day(config: Config, home: str) -> Date:
    """Return the day after the newest night, the newest itself while it is unfinished, or the world's first day.

    Raises:
        UsageError: There is no night yet, and the source is no embedded world.
    """
    records = nights(Journal(store.join(home, "lake", "journal")).entries())
    plain = [record for key, record in records.items() if key == record.date]
    if plain:
        newest = max(plain, key=lambda record: record.date)
        return Date.fromisoformat(newest.date) + timedelta(days=int(newest.is_finished))
    if config.source.world is None:
        raise UsageError("--next needs a night to count from; run the first with --date YYYY-MM-DD", where="next")
    return config.source.world.start
