"""Who is replayed, and which labels 0 are kept: by stable hashes, without bias."""

import numpy as np
import polars as pl
import pytest

from gr_core.data.sampling import Replay, kept_labels
from gr_core.hashing import is_holdout

USERS = [f"u{i}" for i in range(4000)]


def test_replay_draws_about_its_share_of_trained_users_and_others_each_night() -> None:
    """A tenth of the users who are not held out; the same for the same salt in any order, another for another night."""
    replay = Replay(fraction=0.1, salt="0:2025-06-03", holdout_fraction=0.2)

    drawn = replay.users(USERS)

    assert len(drawn) == pytest.approx(0.1 * 0.8 * len(USERS), rel=0.15)
    assert not any(is_holdout(user, 0.2) for user in drawn)
    assert set(replay.users(reversed(USERS))) == set(drawn)
    other = set(Replay(fraction=0.1, salt="0:2025-06-04", holdout_fraction=0.2).users(USERS))
    assert len(other & set(drawn)) < 0.25 * len(drawn)


def test_a_larger_share_adds_users_and_takes_none_away() -> None:
    """Raising the fraction keeps whom a smaller one drew."""
    few, many = (set(Replay(fraction=f, salt="s", holdout_fraction=0.0).users(USERS)) for f in (0.05, 0.2))

    assert few < many


def events(count: int) -> tuple[pl.DataFrame, pl.Series]:
    """Return events with a click rate of 0.2 and a like that follows the click, all due; half the likes unknown."""
    rng = np.random.default_rng(0)
    click = rng.random(count) < 0.2
    like = click & (rng.random(count) < 0.3)
    mask = np.where(rng.random(count) < 0.5, 0b11, 0b01).astype(np.int32)
    frame = pl.DataFrame(
        {
            "event_id": [f"e{i}" for i in range(count)],
            "actions": (click * 1 + like * 2).astype(np.int32),
        }
    )
    return frame, pl.Series(mask)


def test_all_labels_1_stay_and_each_action_loses_the_same_share_of_its_labels_0() -> None:
    """Per action, whatever the other's label: 1s are untouched, 0s are thinned by the fraction; so one offset is exact."""
    frame, mask = events(40_000)

    kept = kept_labels(frame, mask, 0.25, "7")

    for bit in (1, 2):
        label = (frame["actions"] & bit) != 0
        due, left = (mask & bit) != 0, (kept & bit) != 0
        assert left.filter(due & label).all()
        for other in (True, False):  # among events with and without the other action: no bias either way
            part = due & ~label & (((frame["actions"] & (3 - bit)) != 0) == other)
            if part.sum() > 1000:
                assert left.filter(part).mean() == pytest.approx(0.25, abs=0.03)
    assert (kept & ~mask).sum() == 0
    assert kept.dtype == pl.Int32


def test_the_whole_share_changes_nothing_and_the_order_of_rows_neither() -> None:
    """Fraction 1 returns the mask; shuffled rows keep the same labels."""
    frame, mask = events(500)
    order = pl.Series(np.random.default_rng(1).permutation(500))

    assert kept_labels(frame, mask, 1.0, "7").equals(mask)
    assert kept_labels(frame[order], mask.gather(order), 0.3, "7").equals(
        kept_labels(frame, mask, 0.3, "7").gather(order)
    )
