"""Metrics by slice: undefined ones are null with their counts, GAUC says which, shards are joined and never averaged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gr_core.eval.metrics import binary_metrics
from gr_core.eval.slices import COUNTS, METRICS, Slicing, key_part, measure, metric_keys
from gr_core.eval.spread import standard_errors

ACTIONS = ["click", "shown", "like"]


def scored(labels: list[int], logits: list[float], users: str | list[str], **more: Any) -> Any:
    """Return scores of one or more actions' rows; `labels` are masks, logits are click's, like's are their negatives."""
    values = np.array(logits, np.float32)
    known = more.pop("known", [0b101] * len(labels))
    return SimpleNamespace(
        logits=np.stack([values, -values], axis=1),
        action_bits=[0, 2],
        labels=np.array(labels, np.int32),
        label_known=np.array(known, np.int32),
        time=np.zeros(len(labels), np.int64),
        users=list(users),
        digest="rows",
    )


def by(rows: list[dict[str, Any]], name: str, action: str = "click") -> dict[str, Any]:
    (found,) = (row for row in rows if (row["slice"], row["action"]) == (name, action))
    return found


def test_each_slice_has_the_metrics_and_counts_of_its_own_rows() -> None:
    """A slice's figures are those of its rows alone, by action, with rows, positives, users and errors; the whole first."""
    rng = np.random.default_rng(0)
    labels = (rng.random((200, 2)) < 0.4) @ [1, 4]
    rows = scored(labels.tolist(), rng.normal(size=200).tolist(), [f"u{n % 17}" for n in range(200)])
    place = rng.integers(-1, 2, 200)

    found = measure(rows, [Slicing("surface", ("feed", "search"), place)], ACTIONS, 0b101)

    assert [(row["slice"], row["action"]) for row in found] == [
        (name, action) for name in ("all", "surface=feed", "surface=search") for action in ("click", "like")
    ]
    at = place == 1
    own, plain = by(found, "surface=search", "like"), binary_metrics(labels[at] >> 2 & 1, rows.logits[at, 1])
    assert {key: own[key] for key in plain} == plain
    errors = standard_errors(labels[at] >> 2 & 1, rows.logits[at, 1], np.array(rows.users)[at])
    assert (own["auc_error"], own["ne_error"]) == (errors["auc"], errors["ne"])
    assert own["users"] == len(set(np.array(rows.users)[at]))
    assert sum(by(found, name)["count"] for name in ("surface=feed", "surface=search")) == (place >= 0).sum()
    assert by(found, "all")["count"] == 200


def test_gauc_says_which() -> None:
    """Case G6: user mean .6667 and impression-weighted .5556 under their own names; C is in neither, so .5370 is nowhere."""
    p = np.array([0.9, 0.1, 0.5, 0.6, 0.4, 0.7, 0.1, 0.2, 0.3])
    rows = scored([1, 0, 1, 0, 0, 0, 0, 0, 0], np.log(p / (1 - p)).tolist(), "AABBBBCCC", known=[1] * 9)

    found = measure(rows, [Slicing("activity", ("new", "heavy"), np.array([1] * 6 + [0] * 3))], ACTIONS, 1)

    whole, without = by(found, "all"), by(found, "activity=new")
    assert whole["gauc_user_mean"] == pytest.approx(0.6667, abs=1e-4)
    assert whole["gauc_impression_weighted"] == pytest.approx(0.5556, abs=1e-4)
    assert not any(isinstance(value, float) and abs(value - 0.5370) < 1e-4 for value in whole.values())
    assert (whole["users"], whole["gauc_users"]) == (3, 2)
    assert by(found, "activity=heavy")["gauc_user_mean"] == whole["gauc_user_mean"]
    assert (without["gauc_user_mean"], without["gauc_impression_weighted"], without["users"]) == (None, None, 1)
    keys = metric_keys([{**row, "role": "next_day"} for row in found])
    assert keys["next_day/gauc_user_mean/click"] == whole["gauc_user_mean"]
    assert keys["next_day/gauc_impression_weighted/click/activity:heavy"] == pytest.approx(0.5556, abs=1e-4)


def test_a_slice_without_positives_or_rows_is_null_with_its_counts() -> None:
    """Case G5: null and the count, not 0.0, 0.5 or NaN, also where a slice is empty."""
    rows = scored([0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4], "abab", known=[1] * 4)

    found = measure(rows, [Slicing("items", ("new", "known", "none"), np.array([0, 0, 1, 1]))], ACTIONS, 1)

    one, none = by(found, "items=new"), by(found, "items=none")
    for key in ("auc", "ne", "calibration", "gauc_user_mean", "gauc_impression_weighted", "auc_error", "ne_error"):
        assert one[key] is none[key] is None, key
    assert one["log_loss"] is not None
    assert [one[key] for key in COUNTS] == [2, 0, 2, 0]
    assert [none[key] for key in COUNTS] == [0, 0, 0, 0]


def test_untrained_and_broken_logits_are_no_metric() -> None:
    """What was never supervised keeps its counts alone; one NaN leaves its slice nothing, and the others theirs."""
    rows = scored([0b101, 0, 0b101, 0], [0.1, 0.2, 0.3, np.nan], "abab")

    found = measure(rows, [Slicing("s", ("a", "b"), np.array([0, 0, 1, 1]))], ACTIONS, 0b101, unmeasured={"like"})

    assert by(found, "s=a")["auc"] is not None
    assert by(found, "s=b")["auc"] is by(found, "s=b")["gauc_user_mean"] is None
    assert {by(found, "s=a", "like")[key] for key in METRICS} == {None}
    assert by(found, "s=a", "like")["positives"] == 1


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 3]], ids=["1 shard", "2 shards", "4 shards"])
def test_shards_are_joined_never_averaged(cuts: list[int]) -> None:
    """Case G13: two batches of AUC 1 each are 0.75 together, in every slice and in any number of shards."""
    p = np.array([0.9, 0.8, 0.2, 0.1])
    labels, logits = np.array([1, 0, 1, 0], np.int32), np.log(p / (1 - p))
    shards = [np.split(part, cuts) for part in (labels, logits, np.array(list("abab")))]
    joined = [np.concatenate(part).tolist() for part in shards]
    place = np.concatenate(np.split(np.zeros(4, np.int64), cuts))

    found = measure(scored(joined[0], joined[1], joined[2], known=[1] * 4), [Slicing("s", ("x",), place)], ACTIONS, 1)

    assert by(found, "all")["auc"] == by(found, "s=x")["auc"] == 0.75
    assert by(found, "s=x")["gauc_user_mean"] is None  # each user has one class


def test_a_slicing_of_other_rows_is_refused() -> None:
    """Places must be one a row."""
    with pytest.raises(ValueError, match="slicing s must have one place a row, got 3 for 2 rows"):
        measure(scored([0, 1], [0.0, 1.0], "ab"), [Slicing("s", ("x",), np.zeros(3))], ACTIONS, 1)


@pytest.mark.parametrize("value", ["feed", "New York", "a/b", "", "..", "日本", "x=y", "100 %", "v" * 300])
def test_any_value_makes_a_key_that_mlflow_takes(value: str) -> None:
    """Whatever a feed's text holds, the key is valid, and values that differ have keys that differ."""
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    key = f"next_day/auc/click/{key_part(f'surface={value}')}"

    _validate_metric_name(key)
    assert len(key) <= MAX_ENTITY_KEY_LENGTH
    assert key_part(f"surface={value}") != key_part(f"surface={value}_")
    assert key_part("surface=feed") == "surface:feed"
