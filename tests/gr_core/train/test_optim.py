"""The night's schedule, AdamW's state by name, and first steps of new rows."""

import itertools
import math

import pytest
import torch

from gr_core.errors import FormatError
from gr_core.model.embeddings import Tables, TableSpec
from gr_core.train.optim import DenseOptimizer, SparseOptimizer, schedule
from gr_core.train.settings import TrainConfig

CONFIG = TrainConfig(warmup_fraction=0.2, final_fraction=0.1)


def test_f8_the_schedule_is_the_nights_own():
    """T = 10: rises over 2 steps, is 1 at the end of the warm-up and 0.1 at the last step, every night (case F8)."""
    night = [schedule(step, 10, CONFIG) for step in range(10)]

    assert night[:2] == [0.5, 1.0]
    assert night[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(night[1:]))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_nights_have_a_positive_rate(steps):
    """Nights of one to three steps neither divide by zero nor stand still."""
    rates = [schedule(step, steps, CONFIG) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)


def test_a_constant_schedule():
    """Without warm-up and decay the rate is the peak throughout."""
    flat = TrainConfig(warmup_fraction=0.0, final_fraction=1.0)
    assert {schedule(step, 7, flat) for step in range(7)} == {1.0}


def test_dense_state_survives_by_name():
    """A loaded optimizer takes the same next step as the one whose state it took; step counts are kept."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    one, two = DenseOptimizer(first, CONFIG), DenseOptimizer(second, CONFIG)

    def step(model, optimizer, scale):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) * scale).sum().backward()
        optimizer.step(1.0, optimizer.norm())

    for scale in (1.0, -3.0):
        step(first, one, scale)
    second.load_state_dict(first.state_dict())
    two.load({name: tensor.clone() for name, tensor in one.state().items()})
    step(first, one, 0.5)
    step(second, two, 0.5)

    assert torch.equal(first.weight, second.weight)
    assert float(two.state()["optimizer.dense.weight.step"]) == 3
    with pytest.raises(FormatError, match=r"optimizer\.dense\.bias\.exp_avg"):
        two.load({name: t for name, t in one.state().items() if name != "optimizer.dense.bias.exp_avg"})


def test_few_parameters_are_moved_by_one_thread(monkeypatch):
    """The step of a small model wakes no other thread, and leaves the number of threads as it was."""
    optimizer = DenseOptimizer(torch.nn.Linear(4, 4), TrainConfig())
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    seen = []
    monkeypatch.setattr(optimizer._adamw, "step", lambda: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        optimizer.step(1.0, torch.ones(()))
        monkeypatch.setattr(optimizer, "_num_elements", 2**20)
        optimizer.step(1.0, torch.ones(()))
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_clipping_bounds_the_dense_norm():
    """A gradient above clip_norm is scaled to it; one below is left alone."""
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = DenseOptimizer(model, TrainConfig(clip_norm=1.0))
    model.weight.grad = torch.full((1, 4), 100.0)

    optimizer.step(0.0, optimizer.norm())

    assert float(model.weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)


def test_pad_rows_never_move():
    """A gradient on a pad row is dropped: value zero, accumulator unchanged (case E16)."""
    tables = Tables([TableSpec(name="a", rows=4, capacity=4)], 3)
    before = tables.weight.clone()
    optimizer = SparseOptimizer(tables, CONFIG)

    optimizer.collect(torch.tensor([0, 3]), torch.ones(2, 3))
    optimizer.step(1.0)

    assert torch.equal(tables.weight[0], torch.zeros(3))
    assert float(tables.accumulator[0]) == 0.0
    assert not torch.equal(tables.weight[3], before[3])


def test_a_row_that_two_micro_batches_touch_moves_once():
    """Gradients of micro-batches are summed before the accumulator sees them."""
    tables = Tables([TableSpec(name="a", rows=4, capacity=4)], 1)
    optimizer = SparseOptimizer(tables, TrainConfig(sparse_learning_rate=0.1))
    start = float(tables.weight[3])

    optimizer.collect(torch.tensor([3]), torch.tensor([[1.0]]))
    optimizer.collect(torch.tensor([3]), torch.tensor([[2.0]]))
    optimizer.step(0.5)

    assert float(tables.accumulator[3]) == 9.0
    assert float(tables.weight[3]) == pytest.approx(start - 0.05)


def test_f5_the_first_step_of_a_new_row_is_no_bigger_than_an_old_rows():
    """Table 3 to 5 rows (case F5): with one gradient for all, a new row moves as its fallback does, not by the full rate."""
    parent = Tables([TableSpec(name="a", rows=4, capacity=8)], 2)
    trained = SparseOptimizer(parent, CONFIG)
    for _ in range(20):
        trained.collect(torch.tensor([2, 3]), torch.full((2, 2), 0.3))
        trained.step(1.0)
    child = Tables([TableSpec(name="a", rows=6, capacity=8)], 2)
    child.load(parent.state())
    before = child.weight.clone()

    optimizer = SparseOptimizer(child, CONFIG)
    optimizer.collect(torch.arange(2, 6), torch.full((4, 2), 0.3))
    optimizer.step(1.0)

    moved = (child.weight - before).abs()[2:, 0]
    assert torch.allclose(moved[2:], moved[0].expand(2))
    assert float(moved[2]) == pytest.approx(CONFIG.sparse_learning_rate / math.sqrt(21), rel=1e-4)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradients_are_seen(bad):
    """One bad entry, dense or sparse, makes the check fail."""
    tables = Tables([TableSpec(name="a", rows=4, capacity=4)], 2)
    sparse = SparseOptimizer(tables, CONFIG)
    sparse.collect(torch.tensor([3]), torch.tensor([[1.0, bad]]))
    model = torch.nn.Linear(2, 1)
    dense = DenseOptimizer(model, CONFIG)
    model.weight.grad = torch.tensor([[bad, 0.0]])

    assert not bool(sparse.finite())
    assert not bool(torch.isfinite(dense.norm()))
