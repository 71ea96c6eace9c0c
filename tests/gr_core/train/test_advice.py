"""Advice: which rule speaks, how much it expects to save, and the order."""

import pytest

from gr_core.train.advice import advise, with_evaluation

SPLIT = {
    "perf/seconds/forward": 3.0,
    "perf/seconds/backward": 5.0,
    "perf/seconds/optimizer": 1.0,
    "perf/seconds/data_wait": 0.005,
    "perf/seconds/metrics": 0.005,
    "perf/other_seconds": 0.99,
    "perf/attention_flops_fraction": 0.25,
}


def advice(perf=None, train=None, pack=None, **more):
    """Return {first words of the action: expected saving}."""
    found = advise(SPLIT | (perf or {}), {"train": train or {}, "pack": pack or {}}, **more)
    return {one["action"].split(":")[0].split(" =")[0]: one["expected_saving_fraction"] for one in found}


def test_a_good_run_is_told_to_leave_the_kernel_alone():
    """Nothing stands out: the attention kernel is named last, with the little that it could bring."""
    assert advice() == {"measure before touching the attention kernel": pytest.approx(0.8 * 0.25 * 0.2)}


def test_padding_above_30_percent_is_packed():
    """Half of attention's places are empty: half of attention's time, which padding makes 2 parts of 5, is saved."""
    found = advice({"perf/padding_fraction": 0.5}, pack={"layout": "padded"})

    attention = 0.8 * 0.5 / (0.5 + 0.75)
    assert found["pack"] == pytest.approx(0.5 * attention, abs=1e-4)
    assert "pack" not in advice({"perf/padding_fraction": 0.29}, pack={"layout": "padded"})


def test_naive_metrics_above_1_percent_are_fused():
    """Nearly all of what they take is saved; below 1 % nobody minds."""
    slow = {"perf/seconds/metrics": 10.0}
    assert advice(slow, {"metrics": "naive"})["fuse the metrics"] == pytest.approx(0.98 * 10 / 19.995, abs=1e-3)
    assert "fuse the metrics" not in advice({}, {"metrics": "naive"})


def test_switches_left_off_are_named():
    """The fused optimizer always; one lookup for all tables; waits for data; nodes without HSDP."""
    assert advice({}, {"fused_optimizer": False})["set train.fused_optimizer"] == pytest.approx(0.05)
    assert advice({}, {"fused_lookup": False})["set train.fused_lookup"] == 0.1
    waits = advice({"perf/seconds/data_wait": 10.0})
    assert max(waits.values()) == pytest.approx(10 / 19.995, abs=1e-3)
    assert "across nodes set train.distributed.strategy" in advice(nodes=2)
    assert "across nodes set train.distributed.strategy" not in advice(
        {}, {"distributed": {"strategy": "hsdp"}}, nodes=2
    )


def test_the_largest_saving_stands_first():
    """Advice is ranked."""
    found = advise(
        SPLIT | {"perf/seconds/metrics": 9.0, "perf/padding_fraction": 0.9},
        {"train": {"metrics": "naive", "fused_optimizer": False}, "pack": {"layout": "padded"}},
    )

    savings = [one["expected_saving_fraction"] for one in found]
    assert savings == sorted(savings, reverse=True)
    assert found[0]["action"].startswith("fuse the metrics")
    assert len(found) == 4


def test_evaluation_in_line_is_advised_against():
    """Its own share is what it would save, else what LinkedIn saw; beside training there is nothing to say."""
    found = advise(SPLIT | {"perf/seconds/data_wait": 2.0}, {})

    assert with_evaluation(found, None) == found
    assert with_evaluation(found, 0.3)[0]["expected_saving_fraction"] == 0.3
    seen, unknown = with_evaluation(found, 0.0)[:2]
    assert seen == found[0]
    assert unknown["action"].startswith("evaluate off the path")
    assert unknown["expected_saving_fraction"] == 0.16
