from types import SimpleNamespace

import numpy as np

from gr_core.eval.progressive import next_day_metrics, progressive_keys, unscored


def rows(known: list[int], labels: list[int], time: list[int], logits: list[list[float]]) -> SimpleNamespace:
    return SimpleNamespace(
        label_known=np.array(known, np.int32),
        labels=np.array(labels, np.int32),
        time=np.array(time, np.int64),
        logits=np.array(logits, np.float32),
    )


def test_new_events_split_at_the_newest_supervised_event():
    """Example 1 had V2 been promoted: shown after e3 is next_day, e4 (and e3's own moment) is late."""
    scored = rows([1, 1, 1], [1, 0, 1], [12, 33, 58], [[2.0], [0.0], [1.0]])
    found = next_day_metrics(scored, {"click": 33}, ["click"], 1)

    assert (found["new_events"], found["late_events"]) == (3, 2)
    assert (found["next_day"]["click"]["count"], found["next_day"]["click"]["positives"]) == (1, 1)
    assert found["next_day"]["click"]["auc"] is None
    assert (found["late"]["click"]["count"], found["late"]["click"]["auc"]) == (2, 1.0)


def test_each_action_has_its_own_split():
    """An event can be next_day for an action with a long window and late for another; unsupervised ones count not."""
    scored = rows([0b11, 0b11, 0b100], [0b01, 0b00, 0b100], [50, 20, 60], [[1, 1, 1], [0, 0, 0], [0, 0, 0]])
    found = next_day_metrics(scored, {"click": 40, "buy": 10}, ["click", "buy", "hate"], 0b011)

    assert {name: values["count"] for name, values in found["next_day"].items()} == {"click": 1, "buy": 2}
    assert {name: values["count"] for name, values in found["late"].items()} == {"click": 1, "buy": 0}
    assert (found["new_events"], found["late_events"]) == (2, 1)


def test_an_action_never_supervised_is_counted_but_not_measured():
    """Without an entry for the action everything is the future to the model, and its untrained logits are no score."""
    found = next_day_metrics(rows([1, 1], [0, 1], [5, 6], [[0.0], [1.0]]), {}, ["click"], 1)

    assert (found["late_events"], found["next_day"]["click"]["count"]) == (0, 2)
    assert (found["next_day"]["click"]["auc"], found["next_day"]["click"]["ne"]) == (None, None)


def test_every_new_action_counts_exactly_once():
    """next_day and late partition the known labels."""
    rng = np.random.default_rng(0)
    known = rng.integers(0, 4, 200)
    scored = rows(list(known), [0] * 200, list(rng.integers(0, 50, 200)), [[0.0, 0.0]] * 200)
    found = next_day_metrics(scored, {"click": 20, "buy": 30}, ["click", "buy"], 0b11)

    for bit, name in enumerate(["click", "buy"]):
        counted = found["next_day"][name]["count"] + found["late"][name]["count"]
        assert counted == int((known >> bit & 1).sum())


def test_a_night_without_a_parent_counts_but_scores_nothing():
    """The first night: new events are counted, every metric is None with count 0."""
    found = unscored(7, ["click", "hate"], 1)

    assert (found["new_events"], found["late_events"]) == (7, 0)
    assert found["next_day"] == {"click": found["late"]["click"]}
    assert (found["next_day"]["click"]["auc"], found["next_day"]["click"]["count"]) == (None, 0)


def test_metric_keys_are_stable():
    """The keys are the ones that dashboards read."""
    keys = progressive_keys(next_day_metrics(rows([1, 1], [1, 0], [5, 1], [[1.0], [0.0]]), {"click": 2}, ["click"], 1))

    assert keys["next_day/count/click"] == 1
    assert keys["late_events/count/click"] == 1
    assert (keys["next_day/new_events"], keys["late_events/events"]) == (2, 1)
    assert "next_day/auc/click" in keys
