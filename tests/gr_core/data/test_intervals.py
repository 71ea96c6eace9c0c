"""Segments and intervals from times alone, as the embedded world's packs use them."""

import numpy as np
import pytest

from gr_core.data.intervals import Limits, first_not_before, lay_out, starts_of


def longs(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def test_first_not_before_agrees_with_a_search_in_each_slice() -> None:
    """Random slices, empty ones and thresholds outside among them."""
    rng = np.random.default_rng(0)
    times = np.concatenate([np.sort(rng.integers(0, 50, 40)) for _ in range(5)])
    begin = rng.integers(0, 41, 500) + rng.integers(0, 5, 500) * 40
    end = np.minimum(begin + rng.integers(0, 41, 500), (begin // 40 + (begin < 200)) * 40)
    end = np.maximum(begin, np.minimum(end, 200))
    threshold = rng.integers(-5, 56, 500)

    found = first_not_before(times, begin, end, threshold)
    expected = [b + np.searchsorted(times[b:e], t) for b, e, t in zip(begin, end, threshold, strict=True)]
    assert found.tolist() == expected
    assert first_not_before(longs(), longs(0), longs(0), longs(3)).tolist() == [0]


def test_layout_of_two_users() -> None:
    """Example 2 in times only: history of A at 2800..6800, of B at 3800; what nobody sees has no token."""
    history = longs(2800, 2900, 3000, 4000, 6800, 8800, 3800, 4800, 5800)
    layout = lay_out(
        history,
        starts_of(longs(0, 0, 0, 0, 0, 0, 1, 1, 1), 2),
        longs(5000, 7000, 3000, 4000),
        starts_of(longs(0, 0, 1, 1), 2),
        Limits(max_history=128, max_targets=64, max_age_us=10**9, token_budget=8192, time_window_us=3000),
    )

    assert layout.user.tolist() == [0, 1]
    assert layout.lengths.tolist() == [7, 3]
    assert layout.num_targets.tolist() == [2, 2]
    assert layout.source.tolist() == [0, 1, 2, 3, 4, 0, 1, 6, 2, 3]
    assert np.flatnonzero(layout.is_target).tolist() == [5, 6, 8, 9]
    assert layout.lo.tolist() == [0, 0, 0, 0, 3, 0, 3, 0, 0, 0]
    assert layout.hi.tolist() == layout.position.tolist() == [0, 1, 2, 3, 4, 4, 5, 0, 0, 1]


@pytest.mark.parametrize("key", ["max_history", "max_targets", "token_budget"])
def test_limits_that_no_target_fits_are_refused(key: str) -> None:
    """One target with its history must fit."""
    good = {"max_history": 4, "max_targets": 2, "max_age_us": 1, "token_budget": 5}
    Limits(**good)

    with pytest.raises(ValueError, match=key):
        Limits(**{**good, key: good[key] - 1 if key == "token_budget" else 0})
