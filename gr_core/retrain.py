"""A full retrain: what its first attempt pinned, its windows, and how far it has come; all of it in the journal.

It trains from no parent over all days through a given one, in windows of `train.retrain_window_days`, each warm-started
from the one before, then over the days whose nights finished meanwhile. A window's bound is (the pinned commit, the end
of its last day), so along the windows every (event, action) is due once, and to the next night nothing of it is due.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date as Date
from datetime import timedelta
from typing import Any

from gr_core.config import Config
from gr_core.config_rules import check_lake, check_rivals, config_difference
from gr_core.data.due import make_bound
from gr_core.errors import UsageError
from gr_core.hashing import fingerprint
from gr_core.lake import store
from gr_core.lake.entries import Entry
from gr_core.lake.events import EventTable
from gr_core.lake.journal import Journal, JournalMoved, NightRecord, nights
from gr_core.lake.moved import rebased
from gr_core.night import Night, Parent
from gr_core.refs import Bound, day_end_us, iso
from gr_core.train.settings import UNDECIDING

logger = logging.getLogger(__name__)

MODE = "full_retrain"
_DECIDING = ("model", "vocabulary", "sequences", "pack")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrain:
    """An opened full retrain."""

    night: Night
    """The retrain as a whole: its key, folder and journal entries; `date` is the day it was asked for."""
    bound: Bound
    """Pinned: all that its planned windows train on."""
    recipe: str
    """Of what decides the weights; only windows of this recipe are gone on from."""

    @property
    def through(self) -> Date:
        """The last lake day of its planned windows."""
        return self.night.day

    def entries(self) -> list[Entry]:
        """Return the journal as it is now."""
        return self.night.journal.entries()

    def trained(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        """Return the windows trained so far, oldest first."""
        found = trained_windows(nights(entries)[self.night.key], self.recipe)
        return [rebased(one, self.night.home) for one in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A window that is to be trained."""

    number: int
    of: int
    """Windows that were planned; one beyond them catches up."""
    through: Date
    bound: Bound
    parent: Parent | None
    """The window before that trained something."""
    is_planned: bool
    """It is one of the first pass, whose vocabulary was counted before it began; else it catches up."""


def retrain_key(through: Date) -> str:
    """Return the key of a full retrain in the journal, which is also its folder's name."""
    return f"{through.isoformat()}+full-retrain"


def trained_windows(record: NightRecord, recipe: str) -> list[dict[str, Any]]:
    """Return the payloads of the windows that were trained by a recipe, oldest first."""
    return [one for one in record.windows if one["state"] == "trained" and one["recipe"] == recipe]


def open_retrains(entries: Iterable[Entry]) -> list[NightRecord]:
    """Return the full retrains that have not finished, oldest first."""
    return [r for r in nights(entries).values() if r.mode == MODE and not r.is_finished]


def recipe(config: Config, seed: int, erasures: int) -> str:
    """Return the fingerprint of what decides the weights: after a change, or a removal of rows, windows begin anew."""
    resolved = config.resolved()
    return fingerprint(
        {
            **{name: resolved[name] for name in _DECIDING},
            "train": {key: value for key, value in resolved["train"].items() if key not in UNDECIDING},
            "actions": resolved["source"]["actions"],
            "seed": seed,
            "erasures": erasures,
        }
    )


def reached(config: Config, home: str, entries: Sequence[Entry]) -> tuple[Date, int, int] | None:
    """Return how far the finished nights of the main line have read: newest day, newest commit, and its Delta version.

    The version is the commit's, or the newest that removed rows since. None: no night has finished.
    """
    done = [record for record in nights(entries).values() if record.is_main and record.bound is not None]
    if not done:
        return None
    newest = max(done, key=lambda record: record.bound.commit if record.bound else 0)
    table = EventTable(store.join(home, "lake", "events"), config)
    commit = table.find(newest.date)
    if commit is None:
        return None
    return max(Date.fromisoformat(record.date) for record in done), commit.number, table.pin(commit)


def open_retrain(config: Config, home: str, through: Date, *, at_us: int) -> Retrain:
    """Pin a full retrain, or take up the pins of its first attempt.

    Args:
        config: The config of this attempt; `model` and `vocabulary` may differ from the champion's.
        home: URI of the home.
        through: Its last lake day.
        at_us: The time of the journal entry, microseconds since the epoch.

    Raises:
        UsageError: No night of that day or a later one has finished, or another full retrain is unfinished.
        ConfigError: `lake` differs from the home's, or a feature of the champion is gone from the source.
    """
    key, journal = retrain_key(through), Journal(store.join(home, "lake", "journal"))
    while True:
        entries = journal.entries()
        check_lake(config, entries)
        check_rivals(config, entries)
        record = nights(entries).get(key)
        if record is not None:
            return _reopen(config, home, record, journal, at_us)
        check_through(config, home, through, entries)
        night = Night(
            key=key,
            date=through.isoformat(),
            mode=MODE,
            home=home,
            config=config.resolved(),
            parent=None,
            cutoff_us=day_end_us(through, config.lake.zone),
            seed=config.pack.seed,
            at_us=at_us,
        )
        bound, erasures = _pin(config, home, night, entries)
        payload = {**night.to_json(), "fingerprint": config.fingerprint()}
        payload |= {"bound": bound.to_json(), "erasures": erasures}
        try:
            journal.append("opened", key, payload, at_us=at_us, expect=entries[-1].seq)
        except JournalMoved:
            continue
        logger.info("full retrain %s opened: commit %d, cutoff %s", key, bound.commit, bound.cutoff)
        return Retrain(night=night, bound=bound, recipe=recipe(config, night.seed, erasures))


def check_through(
    config: Config, home: str, through: Date, entries: Sequence[Entry], *, running: str | None = None
) -> None:
    """Refuse a full retrain that cannot begin.

    Args:
        config: Its config.
        home: URI of the home.
        through: Its last lake day.
        entries: The whole journal.
        running: Key of the unfinished one that is being run, which is waited for.

    Raises:
        UsageError: As `open_retrain`.
    """
    first = min((r.date for r in nights(entries).values() if r.is_main and r.is_finished), default=None)
    found = reached(config, home, entries)
    if first is None or found is None:
        raise UsageError(
            "full-retrain needs the events of finished nights, and there is none yet; run `daybreak nightly` first",
            where="through",
        )
    if not Date.fromisoformat(first) <= through <= found[0]:
        raise UsageError(
            f"--through {through} is no day that the finished nights cover: they are {first} to {found[0]}; it catches up "
            f"with later days by itself, so name {found[0]}",
            where="through",
        )
    others = [record.date for record in open_retrains(entries) if record.key not in (retrain_key(through), running)]
    if others:
        raise UsageError(
            f"a full retrain through {others[0]} has not finished; run it to its end with --through {others[0]} (it "
            "catches up with later days by itself)",
            where="through",
        )


def _pin(config: Config, home: str, night: Night, entries: Sequence[Entry]) -> tuple[Bound, int]:
    found = reached(config, home, entries)
    assert found is not None
    _, commit, version = found
    bound = make_bound(config, commit, night.cutoff_us, version, None)
    return bound, EventTable(night.table_uri, config).erasures()


def _reopen(config: Config, home: str, record: NightRecord, journal: Journal, at_us: int) -> Retrain:
    """Take up an opened full retrain; its bound is pinned anew where rows were removed from the table since."""
    opened = {key: value for key, value in record.opened.items() if key in Night.__slots__}
    night = replace(Night.from_json(opened), home=home, config=config.resolved(), at_us=at_us)
    night = replace(night, attempt=len(record.attempts) + 1, finished=record.is_finished)
    pinned = next(attempt for attempt in reversed(record.attempts) if "bound" in attempt)
    bound, erasures = Bound.from_json(pinned["bound"]), int(pinned["erasures"])
    if record.is_finished:
        return Retrain(night=night, bound=bound, recipe=recipe(config, night.seed, erasures))
    was = next(attempt["config"] for attempt in reversed(record.attempts) if "config" in attempt)
    payload: dict[str, Any] = {"fingerprint": config.fingerprint(), "config": night.config}
    payload["difference"] = config_difference(was, night.config)
    removed = EventTable(night.table_uri, config).erasures()
    if removed != erasures:
        bound, erasures = _pin(config, home, night, journal.entries())
        payload |= {"bound": bound.to_json(), "erasures": erasures}
        logger.info("full retrain %s: rows were removed from the table, it begins anew", record.key)
    journal.append("attempt", record.key, payload, at_us=at_us)
    made = Retrain(night=night, bound=bound, recipe=recipe(config, night.seed, erasures))
    done = len(trained_windows(record, made.recipe))
    logger.info("full retrain %s taken up again, attempt %d, %d windows trained", record.key, night.attempt, done)
    return made


def window_ends(first: Date, through: Date, days: int) -> list[Date]:
    """Return the last day of each window, oldest first; all but the first window have `days` days."""
    count = -(-((through - first).days + 1) // days)
    return [through - timedelta(days=days * back) for back in reversed(range(count))]


def next_window(retrain: Retrain, first: Date, entries: Sequence[Entry]) -> Window | None:
    """Return what is to be trained next: a planned window, else the days that nights finished meanwhile; None: nothing.

    A window that was started keeps the bound that it started with.

    Args:
        retrain: The full retrain.
        first: Lake day of the oldest event.
        entries: The journal.
    """
    config, night = retrain.night.settings, retrain.night
    done = retrain.trained(entries)
    at = Bound.from_json(done[-1]["bound"]) if done else None
    ends = window_ends(first, retrain.through, config.train.retrain_window_days)
    of = int(done[0]["of"]) if done else len(ends)
    ahead = [end for end in ends if at is None or day_end_us(end, config.lake.zone) > at.cutoff_us]
    number = len(done) + 1
    started = [w for w in nights(entries)[night.key].windows if w["recipe"] == retrain.recipe and w["number"] == number]
    if started:
        through, bound = Date.fromisoformat(started[-1]["through"]), Bound.from_json(started[-1]["bound"])
    elif ahead:
        through, cutoff = ahead[0], day_end_us(ahead[0], config.lake.zone)
        commit, version = retrain.bound.commit, retrain.bound.delta_version
        bound = make_bound(config, commit, cutoff, version, at)
    else:
        behind = missed(retrain, entries)
        if behind is None:
            return None
        through, bound = behind
    planned = bound.commit == retrain.bound.commit and bound.cutoff_us <= retrain.bound.cutoff_us
    parent = newest_checkpoint(done)
    return Window(number=number, of=of, through=through, bound=bound, parent=parent, is_planned=planned)


def missed(retrain: Retrain, entries: Sequence[Entry]) -> tuple[Date, Bound] | None:
    """Return the newest day and bound of the nights that finished since the last window; None: it has caught up."""
    config = retrain.night.settings
    found, done = reached(config, retrain.night.home, entries), retrain.trained(entries)
    at = Bound.from_json(done[-1]["bound"]) if done else retrain.bound
    if found is None:
        return None
    day, commit, version = found
    cutoff = day_end_us(day, config.lake.zone)
    if commit <= at.commit and cutoff <= at.cutoff_us:
        return None
    bound = make_bound(config, max(commit, at.commit), max(cutoff, at.cutoff_us), version, at)
    return day, bound


def newest_checkpoint(trained: Sequence[dict[str, Any]]) -> Parent | None:
    """Return what the next window starts from: the newest one in which something was due; None: nothing was in any."""
    window = next((one for one in reversed(trained) if one.get("checkpoint") is not None), None)
    if window is None:
        return None
    return Parent(
        version=0,
        date=window["through"],
        checkpoint=window["checkpoint"],
        vocabulary=window["vocabulary"],
        watermark=Bound.from_json(window["bound"]),
    )


def window_night(retrain: Retrain, window: Window) -> Night:
    """Return the night value that a window's stages work on, in a folder of its own."""
    return replace(
        retrain.night,
        date=window.through.isoformat(),
        parent=window.parent,
        cutoff_us=window.bound.cutoff_us,
        window=window.number,
    )


def describe(window: Window) -> str:
    """Return what a person reads of a window."""
    what = f"window {window.number} of {window.of}" if window.is_planned else f"window {window.number}, catching up"
    return f"{what}, through {window.through} (cutoff {iso(window.bound.cutoff_us)}, commit {window.bound.commit})"
