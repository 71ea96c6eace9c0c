"""Times by declaration: one instant whatever the unit, zone or format."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gr_core.errors import ConfigError
from tests.feeds import NOON, make_config, ms, read, rows, write


@pytest.mark.parametrize(
    ("values", "time"),
    [
        ([1748779200], {"unit": "s"}),
        ([1748779200 * 10**3], {"unit": "ms"}),
        ([1748779200 * 10**6], {"unit": "us"}),
        ([1748779200 * 10**9 + 999], {"unit": "ns"}),
        (pl.Series([NOON], dtype=pl.Datetime("ns", "UTC")), {}),
        (pl.Series([NOON], dtype=pl.Datetime("ms", "UTC")).dt.convert_time_zone("Asia/Tokyo"), {}),
        (pl.Series([NOON.replace(tzinfo=None)], dtype=pl.Datetime("us")), {}),
        (pl.Series([NOON.replace(tzinfo=None, hour=8)], dtype=pl.Datetime("us")), {"zone": "America/New_York"}),
        (["2025-06-01 08:00:00"], {"format": "%Y-%m-%d %H:%M:%S", "zone": "America/New_York"}),
        (["2025-06-01T14:00:00+0200"], {"format": "%Y-%m-%dT%H:%M:%S%z", "zone": "America/New_York"}),
        (["2025-06-01T12:00:00.000Z"], {"format": "%Y-%m-%dT%H:%M:%S%.f%z", "zone": "America/New_York"}),
        (["2025-06-01T14:00:00+02:00"], {"format": "%+", "zone": "America/New_York"}),
        (["1748779200"], {"format": "%s", "zone": "America/New_York"}),
    ],
)
def test_one_instant_in_every_declaration(tmp_path: Path, values: Any, time: dict[str, Any]) -> None:
    """Cases C5, C12: s, ms, us, ns, zoned, naive and text all give the same instant."""
    write(tmp_path, rows({}).with_columns(pl.Series("ts", values)))
    batch = read(make_config(tmp_path, {"shown_at": {"column": "ts", **time}}))

    assert batch.events["shown_at"].to_list() == [NOON]


def test_text_times_that_cannot_be_are_bad(tmp_path: Path) -> None:
    """Junk, a wall time that the clocks skip, and a year before 2000 are quarantined; a repeated hour is the first."""
    texts = ["junk", "2025-03-09 02:30:00", "1999-12-31 00:00:00", "2024-11-03 01:30:00", None]
    write(tmp_path, rows(*({"ts": text} for text in texts), ts=pl.String))
    shown = {"column": "ts", "format": "%Y-%m-%d %H:%M:%S", "zone": "America/New_York"}
    batch = read(make_config(tmp_path, {"shown_at": shown}))

    assert batch.reasons == {"bad_time": 3, "null_time": 1}
    assert batch.events["shown_at"].to_list() == [datetime(2024, 11, 3, 5, 30, tzinfo=UTC)]


@pytest.mark.parametrize(
    ("text_format", "message"),
    [
        ("%Y-%m-%d %H:%M:%S %Z", "would pass over the zone that %Z names"),
        ("%Y-%m-%d %H", "reads no time: .* both hour and minute"),
    ],
)
def test_a_format_that_loses_the_zone_or_reads_no_time_is_refused(
    tmp_path: Path, text_format: str, message: str
) -> None:
    """Case C5: text that names its zone is never taken for wall time of another; the dotted key is told."""
    write(tmp_path, rows({"ts": "2025-06-01 08:00:00 EST"}))
    shown = {"column": "ts", "format": text_format, "zone": "America/New_York"}
    with pytest.raises(ConfigError, match=rf"source\.feeds\[log\]\.shown_at\.format: .*{message}"):
        read(make_config(tmp_path, {"shown_at": shown}))


MOST = 2**63 - 1


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize(
    ("dtype", "good", "odd"),
    [
        (pl.Datetime("ms"), ms(NOON), [MOST, -MOST, 2**53, ms(NOON) * 1000, -ms(NOON) * 1000]),
        (pl.Datetime("ms", "Asia/Tokyo"), ms(NOON), [MOST, -MOST, 2**53, ms(NOON) * 1000]),
        (pl.Datetime("us"), ms(NOON) * 1000, [MOST, -MOST, 2**62]),
        (pl.Datetime("ns"), ms(NOON) * 10**6, [MOST, -MOST]),
        (pl.Date(), 20_240, [2**31 - 1, -(2**31), 106_751_991, 5_000_000]),
    ],
    ids=str,
)
def test_timestamps_beyond_the_calendar_cost_their_rows(
    tmp_path: Path, dtype: pl.DataType, good: int, odd: list[int], zone: str
) -> None:
    """Microseconds written as milliseconds, and what no calendar holds, are bad times of one row each."""
    stamps = pl.Series("ts", [good, *odd], dtype=pl.Int64).cast(dtype)
    nested = pl.Series("seen", [[stamp] for stamp in [good, *odd]], dtype=pl.List(pl.Int64)).cast(pl.List(dtype))
    write(tmp_path, rows(*[{}] * len(stamps)).with_columns(stamps, nested))
    batch = read(make_config(tmp_path, {"shown_at": {"column": "ts", "zone": zone}}))

    assert batch.events["event_id"].to_list() == ["e0"]
    assert batch.reasons == {"bad_time": len(odd)}
    kept = [json.loads(row) for row in batch.quarantine["row"]]
    assert sorted(row["id"] for row in kept) == [f"e{place}" for place in range(1, len(stamps))]
    assert all(row["ts"] is not None and row["seen"] != [None] for row in kept)
