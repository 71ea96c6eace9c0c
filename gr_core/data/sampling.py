"""What a night trains on beside or instead of all that is due: replayed old events, and fewer labels 0.

Both go by stable hashes, so that a stage that runs again, on any machine, samples the same. Neither changes what is due:
counts of due events, watermarks and judged roles are as without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from gr_core.hashing import is_holdout, stable_hash

_SPAN = 2.0**64


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Which users' old events are trained on again tonight.

    Whole users are sampled, and all their old events: what is read, and the tokens it costs, follow the share, since the
    events of a user share one history; single events sampled over all users would need nearly every user's. Each old event
    comes with probability `fraction` either way, and another night draws other users.
    """

    fraction: float
    """Share of the trained users (0-1)."""
    salt: str
    """Of the hash; the same for every attempt of a night, and another each night."""
    holdout_fraction: float
    """Holdout users are never replayed."""

    def users(self, everyone: Iterable[str]) -> list[str]:
        """Return the sampled ones of distinct users."""
        return [
            user
            for user in everyone
            if stable_hash(f"{self.salt}:{user}", "replay") / _SPAN < self.fraction
            and not is_holdout(user, self.holdout_fraction)
        ]


def kept_labels(events: pl.DataFrame, mask: pl.Series, fraction: float, salt: str) -> pl.Series:
    """Return which due bits stay: every label 1, and the labels 0 of a share of the events.

    The labels 0 of an event stay or go together, for every action alike: kept are those of the events whose hash lies
    below the fraction, also where another action's label is 1. Sampled like that, each action's labels 0 are thinned by
    the same factor whatever the others are, so that one constant undoes it exactly (gr_core.train.denominators). To keep
    all labels 0 of an event that has any label 1 would bias rarer actions, by how much differs from event to event.

    Args:
        events: Rows of the event table: event_id, actions.
        mask: Due bits, Int32, one a row.
        fraction: Share that is kept (0-1].
        salt: Of the hash.

    Returns:
        Int32, one a row; 0: the row is no target.
    """
    if fraction >= 1.0:
        return mask
    frame = events.select("event_id", labels=pl.col("actions") & mask, mask=mask)
    asked = frame["mask"] != frame["labels"]
    dropped = [
        stable_hash(f"{salt}:{event}", "negative") / _SPAN >= fraction for event in frame["event_id"].filter(asked)
    ]
    gone = pl.Series(range(len(frame))).filter(asked).filter(pl.Series(dropped, dtype=pl.Boolean))
    return frame["mask"].scatter(gone, frame["labels"].gather(gone)).cast(pl.Int32)
