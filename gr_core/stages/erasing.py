"""What takes data out of a home again: `daybreak forget USER` and `daybreak retract`.

Both hold the home's locks, so no night and no full retrain runs meanwhile; every step can be repeated, so a run that was killed is finished
by running the same command again. No line that is logged here names a user.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import date as Date
from typing import Any

import polars as pl

from gr_core.config import Config
from gr_core.data import expressions
from gr_core.data.users import stored_user
from gr_core.errors import CommitConflict, FormatError, UsageError
from gr_core.hashing import bucket_of, is_holdout
from gr_core.lake import leftovers, nightfiles, pending, quarantine, store, tombstones, userkey
from gr_core.lake.commits import Commit
from gr_core.lake.events import EventTable, erasure, retraction
from gr_core.lake.history import HistoryStore
from gr_core.lake.journal import Entry, Journal, champion, versions
from gr_core.lake.lineage import Lineage
from gr_core.lake.lock import unread
from gr_core.refs import NEVER, Bound
from gr_core.stages import aliases, sequencing
from gr_core.stages.gathering import history_columns

logger = logging.getLogger(__name__)

_ATTEMPTS = 30


def forget(config: Config, home: str, user: str, *, at_us: int) -> dict[str, Any]:
    """Erase a user from a home: tombstone first, then rows, derived files and what old versions hold.

    Args:
        config: The run's config.
        home: URI of the home.
        user: The id as the raw feed has it; a pseudonymised source finds its stored id by the lake's key.
        at_us: The time of the tombstone and of the journal entry, microseconds since the epoch.

    Returns:
        user, rows ({"events", "sequences", "packs"}: what this run removed; of the last two segments), still_held_by
        ([{"what", "until"}]).

    Raises:
        UsageError: An empty id, or a night is running; nothing has changed.
        ConfigError: The config's lake is not the home's, or the key of a pseudonymised source is missing or another.
    """
    if not user.strip():
        raise UsageError("forget needs the id of a user, got an empty one", where="user")
    own = stored_user(config, user)
    buckets, lake = config.lake.num_buckets, store.join(home, "lake")
    table = EventTable(store.join(lake, "events"), config)
    journal = Journal(store.join(lake, "journal"))
    # refuses another lake's config, and a key that would name another user, before anything is written
    userkey.check(config, home, started=table.exists())
    with unread(home, "forget"):
        aliases.repair_if_moved(config, home)
        entries = journal.entries()
        trained = _trained_on(config, entries, table, own)
        stone = tombstones.add(lake, own, buckets, at_us=at_us, versions=trained)
        rows = {"events": erasure.forget_rows(table.at, table.uri, own, buckets)}
        leftovers.clean(config, lake, own)
        rows |= nightfiles.forget(home, own, bucket_of(own, buckets))
        _forget_history(config, home, own, table.erasures(), removed=rows["events"] > 0)
        erasure.forget_files(table.at, table.uri, own, buckets)
        if any(rows.values()):
            journal.append("forgotten", "forget", {"rows": rows}, at_us=at_us)
    if not entries and not table.exists():
        logger.warning("there is no night in %s yet: only the tombstone was written", home)
    if not user_features(config):
        logger.info("no embedding table is keyed by users, so there is no row to reset")
    if not any(rows.values()) and not stone["versions"] and entries:
        logger.warning(
            "this home holds nothing of that id; ids are matched as the feed has them: was it the right one?"
        )
    lineage = Lineage.of(entries)
    held = _still_held_by(config, sorted(lineage.descendants(stone["versions"]) - lineage.pruned))
    logger.info("forgotten: events %d, sequences %d, packs %d", *(rows[key] for key in ("events", *nightfiles.COUNTED)))
    return {"user": user, "rows": rows, "still_held_by": held}


def _forget_history(config: Config, home: str, user: str, erasures: int, *, removed: bool) -> None:
    """Take a user out of the derived history store; where it is damaged or of another count, the bucket is built anew."""
    rules = sequencing.sequence_rules(config)
    columns, mine = history_columns(rules), bucket_of(user, config.lake.num_buckets)
    for bucket in range(config.lake.num_buckets):
        history = HistoryStore(sequencing.history_uri(home), bucket, columns, rules.max_history)
        try:
            if removed:
                history.purge([user] if bucket == mine else [], erasures)
            elif bucket == mine and history.is_stale(erasures):
                store.remove_tree(history.folder)
        except FormatError as error:
            logger.warning("bucket %d: %s; its history store is removed, the next night makes it anew", bucket, error)
            store.remove_tree(history.folder)


def _trained_on(config: Config, entries: list[Entry], table: EventTable, user: str) -> list[int]:
    """Return the versions whose lineage was trained on a user's events; none for a holdout user.

    A version is asked about the rows that its own night read, as long as those files are there: by now they may have been
    retracted or replaced. Where they are gone, about the rows of today and what a retraction put aside.
    """
    if is_holdout(user, config.lake.holdout_fraction):
        return []
    buckets = config.lake.num_buckets
    today = _points(erasure.user_rows(table.at, user, buckets))
    today |= {(commit, NEVER) for commit in leftovers.retracted(config, table.quarantine_uri, user)}
    found = []
    for version in versions(entries).values():
        points = today
        # where that version cannot be read any more, today's rows have to do
        with contextlib.suppress(FormatError, OSError, pl.exceptions.PolarsError):
            points = today | _points(erasure.user_rows(table.at, user, buckets, version.watermark.delta_version))
        if any(_used(version.watermark, *point) for point in points):
            found.append(version.version)
    return sorted(found)


def _points(rows: pl.DataFrame) -> set[tuple[int, int]]:
    """Return the distinct (commit, shown_at in us) of rows."""
    return set(rows.select("commit", pl.col("shown_at").dt.timestamp("us")).unique().iter_rows())


def _used(watermark: Bound, commit: int, shown_us: int) -> bool:
    """Tell whether a lineage that read so far was trained on an event, or saw it in the history of one that it was."""
    return commit <= watermark.commit and any(shown_us < before for before in watermark.shown_before_us.values())


def _still_held_by(config: Config, trained: list[int]) -> list[dict[str, str]]:
    source = config.source
    return [
        {
            "what": f"raw files below {source.root}",
            "until": "your team deletes them; whenever they are read again, the rows are filtered and counted forgotten",
        },
        *(
            {
                "what": f"model version {version}: weights trained on the user's events (checkpoint, MLflow artifacts)",
                "until": "the next full retrain replaces it, and it is deleted",
            }
            for version in trained
        ),
        {
            "what": "backups of this home, and copies of its files made elsewhere",
            "until": "they expire or are deleted; after restoring one, run forget again",
        },
        {"what": "the tombstone: a hash of the id, no more", "until": "for good, so that the rows stay out"},
        *(
            {
                "what": f"vocabulary and embedding row of the side feature {name}, which is made of the user's id",
                "until": "the next full retrain",
            }
            for name in user_features(config)
        ),
    ]


def user_features(config: Config) -> list[str]:
    """Return the model's side features that are made of the columns of the user's id.

    No table is keyed by users (model.features are item_id and side features), so that there is no embedding row to
    reset; only a side feature that a team made of the user's id has one.
    """
    source, found = config.source, set()
    for feed in source.feeds:
        users = expressions.user_columns(source, feed)
        for value in expressions.feed_values(source, feed):
            if value.name.startswith("side:") and users & set(value.roots):
                found.add(value.name.removeprefix("side:"))
    return [name for name in config.model.features if name in found]


def retract(
    config: Config, home: str, *, date: Date | None, commit: int | None, reason: str, at_us: int
) -> dict[str, Any]:
    """Take back one ingestion: its rows go to quarantine, and no model that was trained on them is used again.

    Events of earlier commits that it had changed get their content from before it, where that can still be read and no
    later commit has changed them again. The champion, where tainted, gives way to its newest untainted ancestor.

    Args:
        config: The run's config.
        home: URI of the home.
        date: The lake day whose ingestion is taken back, or
        commit: its number.
        reason: Why; stands in the journal and in the status of the nights concerned.
        at_us: The time of the journal entry, microseconds since the epoch.

    Returns:
        date or commit as asked for, reason, rows, tainted (versions), next_parent (version; None: a first night).

    Raises:
        UsageError: Not one of date and commit, no such ingestion, nothing left of it to retract, no reason, or a night
            is running; nothing has changed.
    """
    if (date is None) == (commit is None):
        raise UsageError("retract takes either --date or --commit", where="retract")
    if not reason.strip():
        raise UsageError("retract needs a reason, for those who read the status later: --reason TEXT", where="reason")
    table = EventTable(store.join(home, "lake", "events"), config)
    _asked(table, date, commit)  # an unknown one changes nothing, not even a lock
    with unread(home, "retract"):
        night, asked = _asked(table, date, commit)
        journal = Journal(store.join(home, "lake", "journal"))
        entries = journal.entries()
        told = _take_back(config, table, night, asked, reason, entries)
        _drop_waiting(table, asked)
        payload = _journaled(entries, told, date)
        journal.append("retracted", night.night, payload, at_us=at_us)
        aliases.repair(config, home)
    if told.kept:
        logger.warning(
            "%d events that commit %d had changed keep that content: changed again since, or too old to be restored",
            *(told.kept, night.number),
        )
    answer = {"date": date.isoformat()} if date else {"commit": commit}
    return {**answer, **{key: payload[key] for key in ("reason", "rows", "tainted", "next_parent")}}


def _asked(table: EventTable, date: Date | None, commit: int | None) -> tuple[Commit, retraction.Asked]:
    """Find the ingestion that is meant, and which of the numbers that it gave."""
    known = table.commits()
    if date is not None:
        found = table.find(date.isoformat())
        # also what a later night read again of this day
        numbers = frozenset(table.delivered(date.isoformat())[1]) if found is not None else frozenset[int]()
    else:
        found = next((one for one in known if commit in retraction.Ingestion.of(one).numbers), None)
        own = found is not None and found.number == commit
        numbers = retraction.Ingestion.of(found).numbers if found is not None and own else frozenset([commit or 0])
    if found is None:
        there = ", ".join(f"{one.number} ({one.night})" for one in known[-5:]) or "none"
        raise UsageError(
            f"nothing was ingested as {f'commit {commit}' if date is None else f'the night of {date}'}; the newest "
            f"commits are {there}",
            where="date" if date else "commit",
        )
    whole = tuple(retraction.Ingestion.of(one) for one in known if one.number in numbers)
    return found, retraction.Asked(numbers=numbers, whole=whole)


def _take_back(
    config: Config, table: EventTable, night: Commit, asked: retraction.Asked, reason: str, entries: list[Entry]
) -> retraction.Retraction:
    """Remove the rows, or take up what a killed run has done and the journal does not know yet."""

    def keep(bucket: int, rows: pl.DataFrame) -> str:
        # named by the removal, so that a killed or repeated one never overwrites what another one counts
        name = f"{night.night} retracted {table.erasures() + 1} bucket {bucket}"
        return quarantine.write(table.quarantine_uri, night.number, name, _as_quarantine(rows, night.feed))

    def trained(rows: pl.DataFrame) -> pl.Series:
        fraction = config.lake.holdout_fraction
        held = [user for user in rows["user_id"].unique() if is_holdout(user, fraction)]
        return ~rows["user_id"].is_in(pl.Series(held, dtype=pl.String).implode())

    for _ in range(_ATTEMPTS):
        made = retraction.TakeBack(table.at, table.uri, asked, keep=keep, trained=trained).run(reason)
        if made is None:
            continue
        if made.rows or made.restored:
            logger.info("commit %d retracted: rows %d, restored %d", night.number, made.rows, made.restored)
            return made
        newest = table.at()
        before = [] if newest is None else [r for r in retraction.retractions(newest) if r.commits == made.commits]
        known = [e for e in entries if e.kind == "retracted" and e.payload["commits"] == made.commits]
        if len(before) > len(known):
            return before[-1]
        raise UsageError(
            f"nothing to retract: commit {night.number} (night {night.night}) has no row left in the event table",
            where="commit",
        )
    raise CommitConflict(f"commit {night.number}: other writers won every attempt; run it again", where=table.uri)


def _drop_waiting(table: EventTable, asked: retraction.Asked) -> None:
    """Let no action row of what was taken back wait for its impression any longer."""
    last = table.last_commit()
    dropped = pending.drop(table.pending_uri, last.pending, asked.numbers) if last is not None else 0
    if dropped:
        logger.info("waiting action rows of the retracted ingestion dropped: %d", dropped)


def _as_quarantine(rows: pl.DataFrame, feed: str) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "reason": pl.repeat("retracted", rows.height, eager=True, dtype=pl.String),
            "feed": pl.repeat(feed, rows.height, eager=True, dtype=pl.String),
            "file": pl.repeat("", rows.height, eager=True, dtype=pl.String),
            "row": rows.select(pl.struct(pl.all()).struct.json_encode()).to_series(),
        },
        schema=quarantine.SCHEMA,
    )


def _journaled(entries: list[Entry], told: retraction.Retraction, date: Date | None) -> dict[str, Any]:
    """Return the payload of the journal's entry: which versions are tainted, and what the next night starts from."""
    best, found = champion(entries), versions(entries)
    points = [(int(number), first) for number, first in told.earliest_us.items()]
    tainted = sorted(v for v, one in found.items() if any(_used(one.watermark, *point) for point in points))
    return {
        "commits": told.commits,
        "date": date.isoformat() if date else None,
        "reason": told.reason,
        "rows": told.rows,
        "restored": told.restored,
        "kept": told.kept,
        "tainted": tainted,
        "previous": best.version if best else None,
        "next_parent": Lineage.of(entries).untainted(best.version if best else None, tainted),
    }
