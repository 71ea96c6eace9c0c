"""Refs survive JSON, and lake days follow the calendar."""

from __future__ import annotations

from datetime import date

import pytest

from gr_core.refs import Bound, CheckpointRef, PackRef, Rows, day_end_us, day_start_us, iso


def test_refs_survive_a_json_round_trip() -> None:
    """What a stage returns is what the next one reads, nested bounds included."""
    bound = Bound(commit=3, cutoff_us=5, shown_before_us={"click": 4}, delta_version=7)
    checkpoint = CheckpointRef(uri="x", digest="d", step=3, watermark=bound)
    pack = PackRef(uri="p", role="train", num_tokens=1, num_segments=1, num_supervised=1, num_batches=1, digest="d")

    assert CheckpointRef.from_json(checkpoint.to_json()) == checkpoint
    assert PackRef.from_json({**pack.to_json(), "added_later": 1}) == pack


def test_rows_must_add_up() -> None:
    """A count that does not add up is a fault of ours and stops the night."""
    Rows(read=4, committed=1, duplicates=1, quarantined=1, forgotten=1).check()
    with pytest.raises(AssertionError, match="accounting"):
        Rows(read=5, committed=1).check()


@pytest.mark.parametrize(
    ("day", "start", "hours"),
    [
        (date(2025, 3, 9), "2025-03-09T05:00:00Z", 23),
        (date(2025, 11, 2), "2025-11-02T04:00:00Z", 25),
        (date(2025, 6, 1), "2025-06-01T04:00:00Z", 24),
    ],
    ids=str,
)
def test_a_lake_day_follows_the_zones_calendar(day: date, start: str, hours: int) -> None:
    """A day is 23 or 25 hours long where the zone shifts (case D7)."""
    begin, end = day_start_us(day, "America/New_York"), day_end_us(day, "America/New_York")

    assert iso(begin) == start
    assert (end - begin) / 3_600_000_000 == hours
