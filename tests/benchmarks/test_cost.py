"""What a night costs, at a size that shows only that it is measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks._cost import night_cost


def test_a_night_reads_histories_from_the_store_and_writes_little(tmp_path: Path) -> None:
    """On a small table with many inactive users and late rows the ratios are defined and within their goals."""
    found = night_cost(
        str(tmp_path), days=6, inactive=5, late=0.02, active_users=40, events_a_day=200, nights=3, num_buckets=1
    )

    assert found["tokens"] > 1000
    assert found["from_store"] > found["from_table"]
    assert 0 < found["read_ratio"] < 3
    assert 1 < found["write_ratio"] < 3
