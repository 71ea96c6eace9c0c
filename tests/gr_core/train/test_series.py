"""The series of a night's steps, in its checkpoint."""

import pytest

from gr_core.errors import FormatError
from gr_core.train import loop
from gr_core.train.series import SCHEMA, SERIES_FILE, StepSeries, read_series, step_metrics


def test_f8_rates_and_gradient_norm_are_kept_for_every_step(packs, tokens):
    """Two nights of 10 steps (case F8): each series has the whole schedule, finite norms, and steps that count on."""
    pack = packs.pack("p", [tokens.random_user(f"u{i}", 30, 4, seed=i) for i in range(10)], token_budget=60)
    settings = {"dense_learning_rate": 0.02, "warmup_fraction": 0.2, "final_fraction": 0.1}
    for name, parent in (("a", None), ("b", packs.root / "a")):
        state = loop.train(packs.run(pack, name, settings=settings, parent=parent), lambda line: None)
    first, second = (read_series(packs.root / name) for name in ("a", "b"))

    assert second["step"] == list(range(11, 21))
    assert first["dense_learning_rate"] == second["dense_learning_rate"]
    assert [second["dense_learning_rate"][i] for i in (0, 1, -1)] == pytest.approx([0.01, 0.02, 0.002])
    assert all(0 < norm < 1e3 for norm in first["gradient_norm"] + second["gradient_norm"])
    weights = [4.0] * 10
    mean = sum(loss * weight for loss, weight in zip(second["loss"], weights, strict=True)) / sum(weights)
    assert state["metrics"]["train/loss"] == pytest.approx(mean)


def test_a_series_reads_back_and_a_checkpoint_without_one_has_no_steps(tmp_path):
    """What was added comes back, column by column; an older checkpoint gives empty columns, a damaged file an error."""
    series = StepSeries()
    series.add(7, 3, loss=0.5, norm=1.5, rates={"dense_learning_rate": 0.1, "sparse_learning_rate": None})
    (tmp_path / SERIES_FILE).write_bytes(series.to_bytes())

    assert list(read_series(tmp_path).values()) == [[7], [3], [0.5], [1.5], [0.1], [0.0]]
    assert read_series(tmp_path / "older") == {name: [] for name in SCHEMA.names}
    (tmp_path / SERIES_FILE).write_bytes(b"damaged")
    with pytest.raises(FormatError, match=r"steps\.arrow cannot be read"):
        read_series(tmp_path)


def test_a_registry_gets_evenly_spaced_steps_of_a_long_night(tmp_path):
    """Of 101 steps at most 11 are told, every tenth, the first and the last too; of few all are."""
    series = StepSeries()
    rates = {"dense_learning_rate": 0.1, "sparse_learning_rate": 0.2}
    for step in range(1, 102):
        series.add(step, step - 1, loss=float(step), norm=1.0, rates=rates)
    (tmp_path / SERIES_FILE).write_bytes(series.to_bytes())

    told = step_metrics(tmp_path, most=11)

    assert list(told) == list(range(1, 102, 10))
    assert told[101] == {
        "train/step/loss": 101.0,
        "train/step/gradient_norm": 1.0,
        "train/step/dense_learning_rate": 0.1,
        "train/step/sparse_learning_rate": 0.2,
    }
    assert len(step_metrics(tmp_path)) == 101
