"""The table of padding by layout and grouping: calibrated on the report, and small where the product packs."""

import pytest

from benchmarks._padding import PRESETS, padding_table


@pytest.mark.parametrize(("preset", "reported"), [("ads", 0.87), ("feed", 0.75)])
def test_padding_64_random_users_wastes_what_the_report_says(preset: str, reported: float) -> None:
    """Within one percentage point, on any seed."""
    for seed in range(3):
        row = padding_table(preset, num_segments=20_000, seed=seed)[0]
        assert row["padding_fraction"] == pytest.approx(reported, abs=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_packing_wastes_under_a_hundredth(preset: str) -> None:
    """Packed, not grouped: under 1 % of the budget; padded batches waste less the more alike their lengths are."""
    rows = {(row["layout"], row["grouping"]): row for row in padding_table(preset, num_segments=20_000)}

    assert rows["packed", "none"]["wasted_fraction"] < 0.01
    assert all(rows["packed", grouping]["padding_fraction"] == 0 for grouping in ("none", "bucketed", "sorted"))
    padded = [rows["padded", grouping]["wasted_fraction"] for grouping in ("sorted", "bucketed", "none")]
    assert padded == sorted(padded)
    assert padded[-1] > 0.5
