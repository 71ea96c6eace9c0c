"""The rows of one bucket that a night's sequences need, at a cost that follows the night.

In: the bounds of the night and the event table at its pinned version. Out: the rows of all users with a target, and what
brings the history store to that version. What may be a target is read from the table by commit and time; the history
before it comes from the store, overlaid by what came or changed since. Users of whom the store may hold too little are
read whole; so is the bucket where there is no parent or no state of the store to start from. Sequences built from these
rows equal those built from all rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from gr_core.data.due import DueScope
from gr_core.data.sampling import Replay
from gr_core.data.sequences import SequenceRules
from gr_core.errors import FormatError
from gr_core.hashing import is_holdout
from gr_core.lake import history_rows
from gr_core.lake.events import EventTable
from gr_core.lake.history import Cut, HistoryStore, Snapshot
from gr_core.lake.history_entries import HistoryColumns
from gr_core.refs import NEVER
from gr_core.schema import action_time

logger = logging.getLogger(__name__)

Role = Literal["train", "next_day", "holdout"]
ROLES: tuple[Role, ...] = ("train", "next_day", "holdout")
REPLAY = "replay"
"""Mask beside the roles': old events that are trained on again; they go into the train pack, flagged."""
_ORDER = (
    "user_id",
    "shown_at",
    "event_id",
)  # also what tells events apart: an event_id may come again (docs/event_table.md)
_IS_TARGET = pl.any_horizontal(pl.col(role) != 0 for role in ROLES)
_SHOWN = _IS_TARGET | pl.col("counted")
_UNMARKED = (*(pl.lit(0, pl.Int32).alias(role) for role in ROLES), pl.lit(value=False).alias("counted"))
_LATE_US = 14 * 86_400_000_000  # how late a row may be so that its history is still read from the store
_LATER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What was gathered of one bucket."""

    rows: pl.DataFrame
    """Rows of the users with a target in any role, and rows that count for the vocabulary, by (user_id, shown_at,
    event_id); with an Int32 column per role that holds its mask, and `counted` (Boolean). What is neither a target nor
    counted lacks the features that only targets carry."""
    counts: dict[str, int]
    """Events with a bit in each of `DueScope.masks`, of all users."""
    history_read: int
    """Bytes read of the history store."""
    from_store: int
    """Users whose history came from the store."""
    from_table: int
    """Users that were read whole."""


def history_columns(rules: SequenceRules) -> HistoryColumns:
    """Return what the history store keeps for sequences of these rules."""
    types = (by for feature, by in rules.fallback_by if feature in rules.item_features)
    texts = dict.fromkeys(("event_id", "item_id", *rules.item_features, *types))
    return HistoryColumns(texts=tuple(texts), times=tuple(action_time(name) for name in rules.action_names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gatherer:
    """Gathers the rows of one bucket for one night."""

    table: EventTable
    history: HistoryStore
    scope: DueScope
    rules: SequenceRules
    bucket: int
    holdout_fraction: float
    replay: Replay | None = None
    """Whose old events become targets too; None: nobody's, and the rows have no column REPLAY."""
    whole: bool = False
    """Read the whole bucket and leave the history store alone: a full retrain, whose windows lie long ago."""
    counted_after: int | None = None
    """Rows of greater commits count for the vocabulary; None: those that the parent has not seen."""

    def gather(self, *, advance: bool = True) -> Gathered:
        """Gather from the store and what is recent; from the whole bucket where that cannot be.

        Args:
            advance: Bring the store to the pinned version; False only looks.
        """
        gathered = self._gathered(advance=advance)
        return gathered if self.replay is None else self._replayed(gathered, self.replay)

    def _gathered(self, *, advance: bool) -> Gathered:
        version = self.scope.now.delta_version
        erasures = self.table.erasures(version)
        if self.whole:
            return self._whole(None, erasures, advance=False)
        snapshot = self.history.snapshot(version, self.scope.now.commit, erasures)
        recent = recent_from(self.scope)
        if snapshot is not None and recent is not None:
            try:
                return self._from_store(snapshot, *recent, advance=advance)
            except FormatError as error:
                logger.warning("bucket %d: %s; its histories are read from the event table", self.bucket, error)
                snapshot = None
        return self._whole(snapshot, erasures, advance=advance)

    def _whole(self, snapshot: Snapshot | None, erasures: int, *, advance: bool) -> Gathered:
        """Read the bucket; the store is brought along, or made where there is nothing to start from."""
        version = self.scope.now.delta_version
        events = self.table.read(version, buckets=[self.bucket], columns=self._columns)
        if advance and snapshot is None:
            self._write_base(erasures, events)
        elif advance and snapshot is not None:
            changed = events.filter(_changed(snapshot))["user_id"].unique()
            touched = events.filter(pl.col("user_id").is_in(changed.implode()))
            self._advance(snapshot, erasures, touched, _complete(touched))
        marked, counts = self._marked(events)
        del events  # the largest frame there is; what follows holds no second copy of it
        rows = needed(marked, self.rules)
        return Gathered(
            rows=rows,
            counts=counts,
            history_read=snapshot.bytes_read if snapshot else 0,
            from_store=0,
            from_table=rows["user_id"].n_unique(),
        )

    def _from_store(self, snapshot: Snapshot, commit: int, shown_from_us: int | None, *, advance: bool) -> Gathered:
        """Overlay the store's entries by the rows that came, were shown or changed lately."""
        version = self.scope.now.delta_version
        fresh = self.table.read_since(
            version,
            bucket=self.bucket,
            commit_after=min(commit, snapshot.commit),
            shown_from_us=shown_from_us,
            updated_after=snapshot.commit,
            columns=self._columns,
        )
        whole: list[str] = []
        if self.scope.since is None:  # no window yet: all that holdout users ever did is judged
            users = self.table.read(version, buckets=[self.bucket], columns=["user_id"])["user_id"].unique().sort()
            whole = [user for user in users if is_holdout(user, self.holdout_fraction)]
            fresh = self._replaced(fresh, whole)
        marked, counts = self._marked(fresh)
        changed = fresh.filter(_changed(snapshot))["user_id"].unique().sort()
        asked = _SHOWN | pl.col("user_id").is_in(changed.implode())
        wanted = marked.filter(asked)["user_id"].unique().sort()
        rows, floors = self._overlaid(snapshot, marked, wanted, whole)
        if advance:
            touched = rows.filter(pl.col("user_id").is_in(changed.implode()))
            self._advance(
                snapshot, snapshot.erasures, touched, floors.filter(pl.col("user_id").is_in(changed.implode()))
            )
        short = self._short(rows, floors)
        if len(short):
            rows, floors = _deepened(snapshot, rows, floors, short)
            short = self._short(rows, floors)
        rows = self._replaced(rows, short.to_list())
        replaced = {*short, *wanted.filter(wanted.is_in(whole))}
        return Gathered(
            rows=needed(rows, self.rules),
            counts=counts,
            history_read=snapshot.bytes_read,
            from_store=floors.height - len(replaced),
            from_table=len(replaced),
        )

    def _replayed(self, gathered: Gathered, replay: Replay) -> Gathered:
        """Put all rows of the users that are drawn in place of theirs, their old events marked.

        An event with a bit that is due tonight is not replayed: a token is due or replayed, never both.
        """
        everyone = self.table.read(self.scope.now.delta_version, buckets=[self.bucket], columns=["user_id"])
        users = replay.users(everyone["user_id"].unique().sort())
        drawn = pl.col("user_id").is_in(users) & (pl.col("train") == 0)
        again = pl.when(drawn).then(self.scope.old()).otherwise(pl.lit(0, pl.Int32))
        rows = self._replaced(gathered.rows, users).with_columns(again.alias(REPLAY))
        return replace(gathered, rows=needed(rows, self.rules))

    def _overlaid(
        self, snapshot: Snapshot, marked: pl.DataFrame, wanted: pl.Series, whole: list[str]
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return all that is known of the wanted users, and their floors (user_id, floor), both sorted."""
        own = marked.filter(pl.col("user_id").is_in(wanted.implode()))
        stored = snapshot.read(wanted.filter(~wanted.is_in(whole)))
        older = stored.rows.join(own.select(_ORDER), on=_ORDER, how="anti")
        older = older.with_columns(*_UNMARKED)
        rows = pl.concat([own, older], how="diagonal").sort(_ORDER)
        floors = wanted.to_frame("user_id").join(stored.floors, on="user_id", how="left")
        return rows, floors.with_columns(pl.col("floor").fill_null(NEVER)).sort("user_id")

    def _short(self, rows: pl.DataFrame, floors: pl.DataFrame) -> pl.Series:
        """Return the users of whom too little may be known for their oldest target."""
        if not (floors["floor"] > NEVER).any():
            return pl.Series("user_id", [], dtype=pl.String)
        oldest = rows.filter(_IS_TARGET).group_by("user_id").agg(pl.col("shown_at").dt.timestamp("us").min())
        asked = floors.join(oldest, on="user_id", how="left").sort("user_id")
        limits = self.rules.limits
        short = history_rows.too_short(
            history_rows.user_rows(rows, self._times),
            asked["floor"].to_numpy(),
            asked["shown_at"].fill_null(_LATER).to_numpy(),
            limits.max_history,
            min(limits.max_age_us, limits.time_window_us or limits.max_age_us),
        )
        return asked["user_id"].filter(pl.Series(short))

    def _replaced(self, rows: pl.DataFrame, users: list[str]) -> pl.DataFrame:
        """Put all rows that the table has of some users in place of theirs; masks that these rows have stay."""
        if not users:
            return rows
        version = self.scope.now.delta_version
        read = self.table.read_users(version, bucket=self.bucket, users=users, columns=self._columns)
        if "counted" in rows.columns:
            marks = rows.filter(_SHOWN).select(*_ORDER, *ROLES, "counted")
            read = read.join(marks, on=_ORDER, how="left")
            read = read.with_columns(pl.col(ROLES).fill_null(0), pl.col("counted").fill_null(value=False))
        others = rows.filter(~pl.col("user_id").is_in(users))
        return pl.concat([others, read.select(rows.columns)]).sort(_ORDER)

    def _advance(self, snapshot: Snapshot, erasures: int, touched: pl.DataFrame, floors: pl.DataFrame) -> None:
        """Bring the store from a state to what the night read: `touched` are rows of the users that changed since."""
        now, goal = self.scope.now, (self.scope.now.delta_version, self.scope.now.commit)
        if (snapshot.version, snapshot.commit) >= goal or self.history.newest() > goal:
            return  # a night run again takes nothing back
        try:
            over = pl.Series(self._cuts(touched).over)
            long = floors.filter(over & (floors["floor"] > NEVER))["user_id"]
            if len(long):
                touched, floors = _deepened(snapshot, touched, floors, long)
            self.history.advance(snapshot, now.delta_version, now.commit, self._cut(touched, floors, over))
        except FormatError as error:
            logger.warning("bucket %d: %s; its histories are written again", self.bucket, error)
            events = self.table.read(now.delta_version, buckets=[self.bucket], columns=self._columns)
            self._write_base(erasures, events)

    def _write_base(self, erasures: int, events: pl.DataFrame) -> None:
        now = self.scope.now
        if self.history.newest() > (now.delta_version, now.commit):
            return
        over = pl.Series(self._cuts(events).over)
        cut = self._cut(events, _complete(events), over)
        self.history.write_base(now.delta_version, now.commit, erasures, cut)

    def _cuts(self, rows: pl.DataFrame) -> history_rows.Cuts:
        recent, now = recent_from(self.scope), self.scope.now
        start = recent[1] if recent is not None else None
        if start is None:
            start = min(now.shown_before_us.values(), default=now.cutoff_us)
        times = history_rows.user_rows(rows, self._times)
        return history_rows.cuts(times, self.rules.max_history, start, now.cutoff_us - _LATE_US)

    def _cut(self, rows: pl.DataFrame, floors: pl.DataFrame, over: pl.Series) -> Cut:
        wanted = replace(self._cuts(rows), over=over.to_numpy())
        times = history_rows.user_rows(rows, self._times)
        made = history_rows.split(times, floors["floor"].to_numpy(), wanted)
        kept = rows.select(history_columns(self.rules).names)
        return Cut(
            head=kept if made.head.all() else kept.filter(pl.Series(made.head)),
            head_floors=made.head_floors,
            deep=kept.filter(pl.Series(made.deep)),
            deep_floors=made.deep_floors,
        )

    @property
    def _times(self) -> tuple[str, ...]:
        return history_columns(self.rules).times

    @property
    def _columns(self) -> list[str]:
        types = (by for _, by in self.rules.fallback_by)
        weight = (self.rules.event_weight,) if self.rules.event_weight else ()
        names = (*history_columns(self.rules).names, *self.rules.features, *types, *weight, "commit", "updated")
        return list(dict.fromkeys(names))

    def _marked(self, events: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
        """Return rows with each role's mask and whether they count, and the masks' counts."""
        users = events["user_id"].unique()
        held = pl.Series([user for user in users if is_holdout(user, self.holdout_fraction)], dtype=pl.String)
        holdout = events["user_id"].is_in(held.implode())
        masks = self.scope.masks(events, holdout)
        after = self.scope.parent_commit if self.counted_after is None else self.counted_after
        fresh = (pl.col("commit") > after) & (pl.col("commit") <= self.scope.now.commit)
        marked = events.with_columns(*(masks[role].alias(role) for role in ROLES), counted=fresh & ~holdout)
        return marked, {name: int((mask != 0).sum()) for name, mask in masks.items()}


def recent_from(scope: DueScope) -> tuple[int, int | None] | None:
    """Return what every row that may be due or new satisfies: a greater commit than the first, or shown at or after the second.

    Holdout users' rows while there is no window yet (`since`) are left to the caller.

    Returns:
        Commit and time (us; None: no time makes a row due); None where any row may be.
    """
    if scope.parent is None or not scope.earlier:
        return None
    # what is new lies outside all earlier bounds, so outside the newest of them
    newest = max(scope.earlier, key=lambda bound: (bound.commit, bound.cutoff_us))
    bounds = [scope.parent, newest, *([scope.since] if scope.since else [])]
    bits = [name for bit, name in enumerate(scope.action_names) if scope.supervised >> bit & 1]
    names = [name for name in bits if name in scope.now.shown_before_us]
    shown = min((bound.shown_before_us.get(name, NEVER) for bound in bounds for name in names), default=None)
    if shown is not None and shown <= NEVER:
        return None
    return min(bound.commit for bound in bounds), shown


def needed(rows: pl.DataFrame, rules: SequenceRules) -> pl.DataFrame:
    """Keep the rows of users with a target, and those that count; take from mere history what only targets carry.

    Args:
        rows: Event table columns, a mask per role, `counted`, and REPLAY where something is replayed.
        rules: The rules.
    """
    is_target = _IS_TARGET | (pl.col(REPLAY) != 0) if REPLAY in rows.columns else _IS_TARGET
    wanted = rows.select(is_target.any().over("user_id") | pl.col("counted")).to_series()
    rows = rows if wanted.all() else rows.filter(wanted)
    context = [name for name in rules.features if name not in history_columns(rules).texts]
    shown = is_target | pl.col("counted")
    if not context or rows.select(shown.all()).item():
        return rows
    return rows.with_columns(pl.when(shown).then(pl.col(name)).alias(name) for name in context)


def _complete(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the floors of users of whom all rows are there."""
    return rows.select(pl.col("user_id").unique().sort()).with_columns(floor=pl.lit(NEVER, pl.Int64))


def _deepened(
    snapshot: Snapshot, rows: pl.DataFrame, floors: pl.DataFrame, users: pl.Series
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Put the deep entries of some users under what is known of them; rows and floors stay sorted."""
    deep = snapshot.read(users, deep=True)
    own = rows.filter(pl.col("user_id").is_in(users.implode()))
    older = deep.rows.join(own.select(_ORDER), on=_ORDER, how="anti")
    if "counted" in rows.columns:
        older = older.with_columns(*_UNMARKED)
    joined = floors.join(deep.floors, on="user_id", how="left", suffix="_deep")
    lower = joined.select("user_id", floor=pl.coalesce("floor_deep", "floor")).sort("user_id")
    return pl.concat([rows, older], how="diagonal").sort(_ORDER), lower


def _changed(snapshot: Snapshot) -> pl.Expr:
    """Return whether a row came or changed after a state of the store."""
    return (pl.col("commit") > snapshot.commit) | (pl.col("updated") > snapshot.commit)
