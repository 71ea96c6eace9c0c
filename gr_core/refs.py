"""Small frozen values that stages exchange: URIs, counts, hashes and bounds; never frames or tensors.

Every ref survives a JSON round trip (`to_json`, `from_json`); times are microseconds since the epoch, UTC.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Self
from zoneinfo import ZoneInfo

NEVER = -(2**62)  # a shown-bound that no event lies below
CARRIED = ("merged", "duplicates", "pending", "quarantined", "forgotten")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """Base of all refs: JSON in and out, unknown keys ignored so that older readers still read."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON values; keys that this release does not know are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound(Ref):
    """How far a night (bound) or a checkpoint (watermark) has read.

    An (event, action a) is inside when `commit <= bound.commit` and `shown_at < shown_before[a]`;
    with the windows of one config that is the design's `matures_at[a] < cutoff`, since
    shown_before[a] = cutoff - attribution_window[a] - lateness. Keeping the bound on shown_at per action,
    and never letting it fall below the parent's, keeps exactly-once when a window changes between nights.
    """

    commit: int
    """Newest commit (number of one ingestion) inside."""
    cutoff_us: int
    """c: D+1 00:00 in the lake's zone."""
    shown_before_us: dict[str, int] = field(default_factory=dict)
    """Supervised action -> exclusive bound on shown_at."""
    delta_version: int = 0
    """Version of the event table to read."""

    @property
    def cutoff(self) -> str:
        """The cutoff as an ISO time with Z."""
        return iso(self.cutoff_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Ref):
    """Row accounting of one ingestion: read = committed + duplicates + quarantined + forgotten."""

    read: int = 0
    committed: int = 0
    duplicates: int = 0
    quarantined: int = 0
    forgotten: int = 0

    def check(self) -> None:
        """Raise AssertionError when the counts do not add up (a fault of ours, never of the data)."""
        total = self.committed + self.duplicates + self.quarantined + self.forgotten
        if total != self.read:
            raise AssertionError(f"row accounting broken: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionRows(Ref):
    """Accounting of one ingestion's rows of the actions feeds, apart from `Rows`.

    read = merged + duplicates + pending + quarantined + forgotten for the rows read now. Rows that an earlier
    ingestion left pending are counted once more when they are looked at again: pending_before = the sum of `carried`.
    """

    read: int = 0
    merged: int = 0
    """Rows that gave an event an action, or an earlier time of one."""
    duplicates: int = 0
    """Rows of an action that the event has already, from the same or an earlier time."""
    pending: int = 0
    """Rows whose impression is not there yet and may still come."""
    quarantined: int = 0
    forgotten: int = 0
    pending_before: int = 0
    """Rows that the ingestion before left pending."""
    carried: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CARRIED, 0))
    """What became of those: merged, duplicates, pending (again), quarantined, forgotten."""

    def check(self) -> None:
        """Raise AssertionError when the counts do not add up (a fault of ours, never of the data)."""
        total = self.merged + self.duplicates + self.pending + self.quarantined + self.forgotten
        if total != self.read or sum(self.carried.values()) != self.pending_before:
            raise AssertionError(f"action row accounting broken: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRef(Ref):
    """A written pack."""

    uri: str
    role: str
    num_tokens: int
    num_segments: int
    num_supervised: int
    num_batches: int
    digest: str
    """SHA-256 of index.json's own `sha256` entries: equal exactly when the rows are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef(Ref):
    """A complete checkpoint."""

    uri: str
    digest: str
    """SHA-256 over the sorted tensors; equal for equal weights and optimizer state."""
    step: int
    watermark: Bound

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON values, the watermark included."""
        return cls(
            uri=values["uri"],
            digest=values["digest"],
            step=values["step"],
            watermark=Bound.from_json(values["watermark"]),
        )


def iso(us: int) -> str:
    """Format microseconds since the epoch as ISO 8601 with Z; whole seconds without a fraction."""
    moment = datetime.fromtimestamp(us // 1_000_000, UTC).replace(microsecond=us % 1_000_000)
    return moment.isoformat().replace("+00:00", "Z")


def day_start_us(day: date, zone: str) -> int:
    """Return the first instant of a lake day in microseconds since the epoch.

    Goes through the calendar, so a day is 23 or 25 hours long where the zone shifts.
    """
    local = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone))
    return round(local.timestamp()) * 1_000_000


def day_end_us(day: date, zone: str) -> int:
    """Return the first instant after a lake day: the cutoff of its night."""
    return day_start_us(day + timedelta(days=1), zone)
