"""Merging ids, the fused lookup, and rowwise Adagrad."""

import pytest
import torch

from kernels.embedding import fused_lookup, merge_gradients, merge_ids, rowwise_adagrad
from kernels.embedding.reference import fused_lookup_reference, rowwise_adagrad_reference


@pytest.mark.parametrize("num_rows", [10, 100_000], ids=["by counting", "by sorting"])
def test_merge_ids_gives_distinct_rows_and_places(num_rows):
    """Rows are ascending and distinct, and the places rebuild the ids, however large the table is."""
    ids = torch.tensor([7, 3, 7, 0, 9, 3])

    rows, places = merge_ids(ids, num_rows)

    assert rows.tolist() == [0, 3, 7, 9]
    assert torch.equal(rows[places], ids)


def test_lookup_sums_a_bag_and_merges_gradients():
    """A bag is the sum of its rows; a row's gradient is the sum over all its uses."""
    values = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([[0, 1], [1, 1], [3, 0]])

    out = fused_lookup(values, places)
    out.sum().backward()

    assert torch.equal(out, values[places[:, 0]] + values[places[:, 1]])
    assert values.grad[:, 0].tolist() == [2, 3, 0, 1]
    assert fused_lookup(values, places[:, :0]).tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("width", [3, 16, 32, 65])
def test_lookup_equals_the_reference_to_the_last_bit_where_features_have_rows_of_their_own(width):
    """Values and gradients, many uses of a row, widths with and without a rest behind the vector registers."""
    torch.manual_seed(width)
    places = torch.randint(0, 40, (3000, 4)) ** 2 // 40 + 40 * torch.arange(4)
    start, above = torch.randn(160, width), torch.randn(3000, width)
    found = []
    for lookup in (fused_lookup, fused_lookup_reference):
        values = start.clone().requires_grad_()
        out = lookup(values, places)
        out.backward(above)
        found.append((out, values.grad))

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_lookup_shares_rows_between_features():
    """Where features read the same rows, the gradient is the reference's up to rounding; fp64 by finite differences."""
    torch.manual_seed(0)
    places = torch.randint(0, 5, (40, 3))
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda v: fused_lookup(v, places), values)


@pytest.mark.parametrize("width", [3, 16, 65])
def test_updates_equal_the_reference_to_the_last_bit(width):
    """Weights and accumulators after three steps on changing rows."""
    torch.manual_seed(width)
    weight, accumulator = torch.randn(500, width), torch.rand(500)
    other, state = weight.clone(), accumulator.clone()
    for _ in range(3):
        rows, grad = torch.randperm(500)[:200], torch.randn(200, width)
        rowwise_adagrad(weight, accumulator, rows, grad, learning_rate=0.05)
        rowwise_adagrad_reference(other, state, rows, grad, learning_rate=0.05, eps=1e-8)

    assert torch.equal(weight, other)
    assert torch.equal(accumulator, state)


def test_gradients_of_micro_batches_merge_by_row():
    """Rows that several micro-batches touched appear once, with the sum."""
    first = (torch.tensor([1, 4]), torch.tensor([[1.0], [2.0]]))
    second = (torch.tensor([0, 4]), torch.tensor([[10.0], [20.0]]))

    rows, grad = merge_gradients([first, second])

    assert rows.tolist() == [0, 1, 4]
    assert grad.tolist() == [[10.0], [1.0], [22.0]]


def test_rowwise_adagrad_by_hand():
    """Accumulator += mean(grad^2); row -= lr * grad / sqrt(accumulator); other rows stay as they are."""
    weight, accumulator = torch.ones(3, 2), torch.tensor([0.0, 7.0, 0.0])

    rowwise_adagrad(weight, accumulator, torch.tensor([1]), torch.tensor([[3.0, 3.0]]), learning_rate=0.4)

    assert accumulator.tolist() == [0.0, 16.0, 0.0]
    assert torch.allclose(weight, torch.tensor([[1.0, 1.0], [0.7, 0.7], [1.0, 1.0]]))


def test_shapes_that_do_not_fit_are_named():
    """Each check names what it got."""
    with pytest.raises(ValueError, match="int64"):
        merge_ids(torch.tensor([1.0]), 3)
    with pytest.raises(ValueError, match=r"\[U, D\]"):
        fused_lookup(torch.zeros(3), torch.zeros(1, 1).long())
    with pytest.raises(ValueError, match="one entry a row"):
        rowwise_adagrad(torch.zeros(3, 2), torch.zeros(2), torch.tensor([0]), torch.zeros(1, 2), learning_rate=1.0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_that_are_not_there_are_refused(impl):
    """On the CPU a place beyond the rows, one below 0 and other dtypes are named before anything is read or written."""
    rows, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    for place in (-1, 1):
        with pytest.raises(ValueError, match=rf"places must be in \[0, 1\), got {place}"):
            fused_lookup(rows, torch.tensor([[place]]), impl=impl)
    with pytest.raises(ValueError, match="places must be int64"):
        fused_lookup(rows, torch.zeros(1, 1, dtype=torch.int32), impl=impl)
    for row in (-1, 3):
        with pytest.raises(ValueError, match=rf"rows must be in \[0, 3\), got {row}"):
            rowwise_adagrad(weight, torch.zeros(3), torch.tensor([row]), rows, learning_rate=1.0, impl=impl)
    with pytest.raises(ValueError, match="rows must be in"):
        merge_gradients([(torch.tensor([-1]), rows), (torch.tensor([1]), rows)], impl=impl)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_gradients([], impl=impl)
