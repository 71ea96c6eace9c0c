"""Which (event, action)s are due and which are new: the bound of a night, and masks over the event table.

inside(bound)[a] = commit <= bound.commit and shown_at < bound.shown_before_us[a]. What is due is inside now and not
inside the parent's watermark, so late data, backfills, rejections and rollbacks need no special case (example 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from gr_core.config import Config
from gr_core.errors import BoundError
from gr_core.refs import NEVER, Bound

US = 1_000_000


def make_bound(config: Config, commit: int, cutoff_us: int, delta_version: int, parent: Bound | None) -> Bound:
    """Return the bound of a night.

    shown_before_us[a] = cutoff - attribution window - lateness, never below the parent's: so nothing is due twice when
    a window grows between nights. An action that is no longer supervised keeps the parent's value: should it be
    supervised again, what was due before is not due a second time.

    Args:
        config: Actions with their windows, and the lateness.
        commit: Number of the night's ingestion.
        cutoff_us: D+1 00:00 in the lake's zone, us.
        delta_version: Version of the event table that holds the commit.
        parent: The parent's watermark; None for a lineage's root.

    Returns:
        The bound.
    """
    shown_before = dict(parent.shown_before_us) if parent else {}
    for action in config.source.actions:
        if action.supervise:
            window_us = (action.attribution_window_seconds + config.source.lateness_seconds) * US
            final = cutoff_us - window_us
            shown_before[action.name] = max(final, shown_before.get(action.name, final))
    return Bound(commit=commit, cutoff_us=cutoff_us, shown_before_us=shown_before, delta_version=delta_version)


def check_not_behind(now: Bound, parent: Bound) -> None:
    """Refuse a run whose commit or cutoff lies below its parent's.

    Raises:
        BoundError: A checkpoint with that watermark would make events due a second time; names both bounds.
    """
    if now.commit < parent.commit or now.cutoff_us < parent.cutoff_us:
        raise BoundError(
            f"a night's bound must not lie below its parent's: it is (commit {now.commit}, cutoff {now.cutoff}), "
            f"the parent's (commit {parent.commit}, cutoff {parent.cutoff}); run a later date, or name an older "
            "parent with --parent",
            where="bound",
        )


def inside_mask(bound: Bound, action_names: Sequence[str]) -> pl.Expr:
    """Return the bits of the actions that are inside a bound.

    Args:
        bound: The bound; actions that it does not name are not inside.
        action_names: All actions in bit order.

    Returns:
        Int32 over rows of the event table (`commit`, `shown_at`).
    """
    shown = pl.col("shown_at").dt.timestamp("us")
    mask = pl.lit(0, pl.Int32)
    for bit, name in enumerate(action_names):
        before = bound.shown_before_us.get(name)
        if before is not None:
            mask = mask | pl.when(shown < before).then(pl.lit(1 << bit, pl.Int32)).otherwise(pl.lit(0, pl.Int32))
    return pl.when(pl.col("commit") <= bound.commit).then(mask).otherwise(pl.lit(0, pl.Int32))


def due_mask(
    now: Bound,
    parent: Bound | None,
    action_names: Sequence[str],
    supervised_mask: int,
    context_commits: frozenset[int] = frozenset(),
) -> pl.Expr:
    """Return the bits of the actions that are due: inside now and not inside the parent's watermark.

    Args:
        now: The night's bound.
        parent: The parent's watermark; None for a lineage's root.
        action_names: All actions in bit order.
        supervised_mask: Bits of the supervised actions; the others are never due.
        context_commits: Commits that are context only (a bootstrap with due = false): never due.

    Returns:
        Int32 over rows of the event table; only bits of `known` are set.
    """
    return new_mask(now, [] if parent is None else [parent], action_names, supervised_mask, context_commits)


def new_mask(
    now: Bound,
    earlier: Sequence[Bound],
    action_names: Sequence[str],
    supervised_mask: int,
    context_commits: frozenset[int] = frozenset(),
) -> pl.Expr:
    """Return the bits of the actions that are new: inside now and inside no earlier finished night's bound.

    Args:
        now: The night's bound.
        earlier: The bounds of all earlier finished nights, whatever was promoted.
        action_names: All actions in bit order.
        supervised_mask: Bits of the supervised actions; the others are never new.
        context_commits: Commits that are context only: never new.

    Returns:
        Int32 over rows of the event table; only bits of `known` are set.
    """
    mask = inside_mask(now, action_names) & pl.col("known") & pl.lit(supervised_mask, pl.Int32)
    for bound in outermost(earlier):
        # xor with all ones, since polars has no bitwise not on expressions of integers.
        mask = mask & (inside_mask(bound, action_names) ^ pl.lit(-1, pl.Int32))
    if context_commits:
        context = pl.col("commit").is_in(sorted(context_commits))
        mask = pl.when(context).then(pl.lit(0, pl.Int32)).otherwise(mask)
    return mask


def outermost(bounds: Sequence[Bound]) -> list[Bound]:
    """Return the bounds that lie within no other one, newest first: of a year of nights usually one."""
    kept: list[Bound] = []
    for bound in sorted(bounds, key=lambda one: (one.commit, one.cutoff_us), reverse=True):
        if not any(_within(bound, other) for other in kept):
            kept.append(bound)
    return kept


def _within(bound: Bound, other: Bound) -> bool:
    """Tell whether whatever is inside a bound is inside the other one."""
    reaches = (before <= other.shown_before_us.get(name, NEVER) for name, before in bound.shown_before_us.items())
    return bound.commit <= other.commit and all(reaches)


@dataclass(frozen=True, kw_only=True, slots=True)
class DueScope:
    """The bounds that decide what is due, new and held out for one night."""

    now: Bound
    parent: Bound | None
    earlier: tuple[Bound, ...]
    """Bounds of the finished nights: what lies inside one of them is not new."""
    since: Bound | None
    """Bound of the gate's window start: holdout events outside it and inside `now` are judged."""
    context_commits: frozenset[int]
    """Commits that are context only: never due, never new."""
    action_names: tuple[str, ...]
    supervised: int

    @property
    def parent_commit(self) -> int:
        """The newest commit the parent has seen; 0 without a parent."""
        return self.parent.commit if self.parent else 0

    def identity(self) -> str:
        """Return what the masks depend on, as text."""
        return repr(self)

    def old(self) -> pl.Expr:
        """Return the bits of the actions that are not due because the parent's lineage had them: inside its watermark.

        Returns:
            Int32 over rows of the event table; 0 without a parent.
        """
        if self.parent is None:
            return pl.lit(0, pl.Int32)
        return new_mask(self.parent, [], list(self.action_names), self.supervised, self.context_commits)

    def masks(self, events: pl.DataFrame, holdout: pl.Series) -> dict[str, pl.Series]:
        """Return int32 masks of actions, one entry per row of `events`.

        Args:
            events: Event table columns, any order.
            holdout: Boolean per row: its user is evaluated only.

        Returns:
            due (all users), due_holdout, and the targets of the roles: train (due, trained users), next_day (new
            events of all users), holdout (holdout users' events that came due in the gate's window).
        """
        names, supervised, context = list(self.action_names), self.supervised, self.context_commits
        window = (self.since,) if self.since else ()
        frame = events.select(
            due=due_mask(self.now, self.parent, names, supervised, context),
            next_day=new_mask(self.now, self.earlier, names, supervised, context),
            window=new_mask(self.now, window, names, supervised, context),
        )
        none = pl.zeros(events.height, pl.Int32, eager=True)
        return {
            "due": frame["due"],
            "due_holdout": frame["due"].zip_with(holdout, none),
            "train": none.zip_with(holdout, frame["due"]),
            "next_day": frame["next_day"],
            "holdout": frame["window"].zip_with(holdout, none),
        }
