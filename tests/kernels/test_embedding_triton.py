"""The embedding kernels in Triton, interpreted on the CPU, against torch in fp64."""

import numpy as np
import pytest
import torch

from gr_core.model.embeddings import RowMap, TableSpec
from gr_core.schema import FIRST_FALLBACK_ROW
from gr_core.schema import PAD_ROW as PACK_PAD_ROW
from kernels.embedding import (
    Layout,
    fused_lookup,
    lookup_tables,
    merge_gradients,
    merge_table_gradients,
    rowwise_adagrad,
    update_tables,
)
from kernels.embedding.layout import FALLBACK_ROW, PAD_ROW
from kernels.embedding.reference import (
    fused_lookup_reference,
    lookup_tables_reference,
    map_rows_reference,
    merge_table_gradients_reference,
    round_stochastically,
    rowwise_adagrad_reference,
)

triton_op = pytest.importorskip("kernels.embedding.triton_op")

CHUNK = 64
"""Longest run of equal ids that one lane adds up; written out, so that sizes here stay on both sides of it."""
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3}}
"""Of what is stored in a dtype, against fp64 on the same inputs; sums are fp32 inside."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])


def close(found, expected, dtype):
    torch.testing.assert_close(found.double(), expected.double(), **TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote holds NaN, or the largest number: what is read from it shows."""
    plain = torch.empty

    def empty(*shape, **settings):
        out = plain(*shape, **settings)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", empty)
    torch.manual_seed(0)


def two_tables(width, dtype=torch.float32):
    """Three features over two tables, the second seen by two: ids with pads, absent ones and ones not known."""
    layout = Layout.of([0, 7, 7], [7, 12, 12], [torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 3]), None, None])
    weight = torch.randn(20, width).to(dtype)
    weight[[0, 7]] = float("nan")  # pad rows are not read
    return weight, layout


def mixed_ids(bags):
    ids = torch.randint(-1, 16, (bags, 3))
    ids[:, 0] = ids[:, 0].clamp(max=14)
    return ids


@DTYPES
@pytest.mark.parametrize(("bags", "width"), [(1, 64), (63, 16), (127, 65), (129, 3), (1025, 8)])
def test_lookup_and_its_gradient_are_those_of_fp64(bags, width, dtype):
    """Sums of bags and the gradient of every distinct row, for rows that are used often, once and never."""
    places = torch.randint(0, 41, (bags, 3)) ** 2 // 41
    values = torch.randn(45, width).to(dtype).requires_grad_()
    exact = values.detach().double().requires_grad_()
    above = torch.randn(bags, width).to(dtype)

    out = fused_lookup(values, places, impl="triton")
    expected = fused_lookup_reference(exact, places)
    out.backward(above)
    expected.backward(above.double())

    assert out.dtype == values.grad.dtype == dtype
    close(out, expected, dtype)
    close(values.grad, exact.grad, dtype)


@pytest.mark.parametrize("uses", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3])
def test_runs_end_anywhere(uses):
    """Hot ids of every length around the pieces that they are added in, one behind another, at any place of a window."""
    places = torch.cat([torch.full((n,), row) for row, n in enumerate((3, uses, uses, 1, uses, uses + 7))])
    places = places[torch.randperm(len(places))][:, None]
    values = torch.randn(6, 5, requires_grad=True)
    above = torch.randn(len(places), 5)

    fused_lookup(values, places, impl="triton").backward(above)

    close(values.grad, torch.zeros(6, 5).double().index_add_(0, places[:, 0], above.double()), torch.float32)


def test_short_runs_are_added_as_on_the_cpu():
    """Where no id has more uses than a lane adds up, gradients equal the CPU's to the last bit."""
    places = torch.stack([torch.randperm(40).repeat(8), 40 + torch.randint(0, 40, (320,))], dim=1)
    start, above = torch.randn(80, 6), torch.randn(320, 6)
    grads = []
    for impl in ("triton", "reference"):
        values = start.clone().requires_grad_()
        fused_lookup(values, places, impl=impl).backward(above)
        grads.append(values.grad)

    assert torch.equal(*grads)


@DTYPES
@pytest.mark.parametrize("concatenate", [False, True], ids=["summed", "side by side"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_tables_are_read_in_one_launch(dtype, concatenate, ids_dtype):
    """Offsets, shared tables, pads, absent and unknown ids; output in the other dtype; and the weight's gradient."""
    weight, layout = two_tables(20, dtype)
    ids = mixed_ids(37).to(ids_dtype)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    weight.requires_grad_()
    exact = weight.detach().double().nan_to_num().requires_grad_()

    out = lookup_tables(weight, ids, layout, concatenate=concatenate, out_dtype=other, impl="triton")
    expected = lookup_tables_reference(exact, ids, layout, concatenate=concatenate, out_dtype=torch.float64)
    above = torch.randn(expected.shape).to(other)
    out.backward(above)
    expected.backward(above.double())

    assert out.dtype == other
    close(out, expected, torch.bfloat16)
    close(weight.grad, exact.grad, dtype)


@pytest.mark.parametrize("names", [9, 6, 3], ids=["fewer known than named", "as many", "more known than named"])
def test_unknown_ids_read_what_the_row_map_says(names):
    """The reference and the kernel follow gr_core's RowMap, beyond the named rows, too."""
    own = np.array([0, 1, 2, 3, 4, 3, 4, 3, 4])[:names]
    specs = [TableSpec(name="a", rows=4, capacity=4)]
    specs += [TableSpec(name="b", rows=names, capacity=9, fallbacks=3, fallback_of=own)]
    rows = RowMap(specs, {"a": 4, "b": 6})
    layout = Layout.of([rows.offset["b"]], [rows.known["b"]], [torch.from_numpy(specs[1].fallback_rows())])
    ids = torch.arange(1, 13)[:, None]
    weight = torch.arange(10.0)[:, None]

    flat = rows.map("b", ids[:, 0].int().numpy())

    assert (PAD_ROW, FALLBACK_ROW) == (PACK_PAD_ROW, FIRST_FALLBACK_ROW)
    assert map_rows_reference(ids, layout)[:, 0].tolist() == flat.tolist()
    assert lookup_tables(weight, ids, layout, impl="triton")[:, 0].tolist() == flat.tolist()


@pytest.mark.parametrize("bags", [0, 1, 150])
@pytest.mark.parametrize("concatenate", [False, True], ids=["summed", "side by side"])
def test_gradients_merge_to_distinct_rows(bags, concatenate):
    """Rows ascending, without pads and absent ids, and fp32 gradients; no bags: no rows."""
    weight, layout = two_tables(7)
    ids = mixed_ids(bags)
    grad = torch.randn(bags, weight.shape[1] * (3 if concatenate else 1)).bfloat16()

    rows, merged = merge_table_gradients(grad, ids, layout, concatenate=concatenate, impl="triton")
    expected = merge_table_gradients_reference(grad.double(), ids, layout, concatenate=concatenate)

    assert rows.tolist() == expected[0].tolist()
    assert merged.dtype == torch.float32
    close(merged, expected[1], torch.float32)


def test_no_bags_is_no_work():
    """Empty outputs, a gradient of zero, and no update."""
    weight, layout = two_tables(4)
    weight, accumulator = weight.nan_to_num().requires_grad_(), torch.zeros(20)

    out = lookup_tables(weight, mixed_ids(0), layout, impl="triton")
    out.sum().backward()
    update_tables(weight.detach(), accumulator, out.detach(), mixed_ids(0), layout, learning_rate=1.0, impl="triton")

    assert out.shape == (0, 4)
    assert fused_lookup(weight, mixed_ids(0), impl="triton").shape == (0, 4)
    assert not weight.grad.any()
    assert not accumulator.any()


def test_nothing_but_absent_ids_is_no_row():
    """A batch of pads and absent ids has zero output, no rows and no update, even with a gradient of NaN."""
    weight, layout = two_tables(4)
    ids = torch.tensor([[PAD_ROW, -1, PAD_ROW]]).repeat(2 * CHUNK, 1)
    grad = torch.full((2 * CHUNK, 4), float("nan"))
    before, accumulator = weight.clone(), torch.zeros(20)

    out = lookup_tables(weight, ids, layout, impl="triton")
    rows, merged = merge_table_gradients(grad, ids, layout, impl="triton")
    update_tables(weight, accumulator, grad, ids, layout, learning_rate=1.0, impl="triton")

    assert not out.any()
    assert (rows.shape, merged.shape) == ((0,), (0, 4))
    assert torch.equal(weight.nan_to_num(9), before.nan_to_num(9))
    assert not accumulator.any()


def test_rows_behind_the_merged_ones_are_marked():
    """The operator returns as many rows as there could be, for hosts that do not wait: -1 with a gradient of zero."""
    ids = torch.tensor([[3], [3], [1]])

    rows, merged, count = triton_op.embedding_merge(torch.ones(3, 2), ids, None, None, 50, concatenate=False)

    assert (rows.tolist(), count.tolist()) == ([1, 3, -1], [2])
    assert merged.tolist() == [[1, 1], [2, 2], [0, 0]]


@DTYPES
def test_tables_are_updated_in_place(dtype):
    """Weights and accumulators after three steps; hot ids, pads and ids not known among them."""
    weight, layout = two_tables(12, dtype)
    weight = weight.nan_to_num()
    exact, accumulator = weight.double(), torch.rand(20)
    state = accumulator.double()
    for _ in range(3):
        ids, grad = mixed_ids(400), torch.randn(400, 12)
        update_tables(weight, accumulator, grad, ids, layout, learning_rate=0.05, impl="triton")
        update_tables(exact, state, grad.double(), ids, layout, learning_rate=0.05, impl="reference")

    close(accumulator, state, torch.float32)
    torch.testing.assert_close(
        weight.double(),
        exact,
        rtol=8e-3 if dtype == torch.bfloat16 else 1e-4,
        atol=2e-2 if dtype == torch.bfloat16 else 1e-5,
    )
    assert not weight[[0, 7, 19]].sub(exact[[0, 7, 19]]).any()  # pads, and a row behind the tables


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 65), (63, 16), (129, 3)])
def test_adagrad_is_the_references(count, width, dtype):
    """Rows of a weight and their state; fp32 and bf16 gradients."""
    weight, accumulator = torch.randn(200, width).to(dtype), torch.rand(200)
    exact, state = weight.double(), accumulator.double()
    rows, grad = torch.randperm(200)[:count], torch.randn(count, width).to(dtype)

    rowwise_adagrad(weight, accumulator, rows, grad, learning_rate=0.05, eps=1e-3, impl="triton")
    rowwise_adagrad_reference(exact, state, rows, grad.double(), learning_rate=0.05, eps=1e-3)

    close(accumulator, state, torch.float32)
    close(weight, exact, dtype)


def test_stochastic_rounding_is_seeded_and_keeps_small_steps():
    """Kernel and reference round alike, bit for bit; another seed rounds otherwise; steps below half a gap add up."""
    start, rows, grad = torch.ones(40, 16).bfloat16(), torch.randperm(40), torch.ones(40, 16)
    found = []
    for impl, seed in (("triton", 5), ("reference", 5), ("triton", 6)):
        weight = start.clone()
        rowwise_adagrad(weight, torch.zeros(40), rows, grad, learning_rate=2**-11, seed=seed, impl=impl)
        found.append(weight)

    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert (1 - found[0].double()).mean().item() == pytest.approx(2**-11, rel=0.3)
    odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), 0.0]])
    assert round_stochastically(odd, torch.tensor([3]), 1).tolist()[0][:2] == [float("inf"), -float("inf")]


def test_micro_batches_merge_as_on_the_cpu():
    """Rows ascending and gradients added part after part, to the last bit."""
    parts = [(torch.randperm(90)[:60], torch.randn(60, 5)) for _ in range(4)]

    found = merge_gradients(parts, impl="triton")
    expected = merge_gradients(parts, impl="reference")

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_rows_lie_beyond_two_to_the_31_numbers():
    """A table of more than 2^31 numbers is read and moved at its end, by int64 addresses; its memory is not touched."""
    num_rows, width = 2**27 + 3, 16
    weight = torch.from_numpy(np.zeros((num_rows, width), np.int16)).view(torch.bfloat16)  # torch.zeros would write it
    accumulator = torch.from_numpy(np.zeros(num_rows, np.float32))
    weight[-1] = 3.0
    layout = Layout.of([2**27 - 2], [5])
    ids = torch.tensor([[4], [1], [4]])

    out = lookup_tables(weight, ids, layout, impl="triton")
    update_tables(weight, accumulator, torch.ones(3, width), ids, layout, learning_rate=1.0, impl="triton")
    rowwise_adagrad(
        weight, accumulator, torch.tensor([num_rows - 2]), torch.ones(1, width), learning_rate=1, impl="triton"
    )

    assert out[:, 0].tolist() == [3, 0, 3]
    assert weight[-5:, 0].tolist() == [0, -1, 0, -1, 2]
    assert accumulator[-5:].tolist() == [0, 1, 0, 1, 4]
    assert not weight[:4].any()


def test_operators_are_sound():
    """Schemas, fakes, autograd and what they say that they change: torch's own checks, shapes dynamic."""
    weight, layout = two_tables(4)
    weight = weight.nan_to_num().requires_grad_()
    ids, grad = mixed_ids(9), torch.randn(9, 4)
    tables = (layout.tables, layout.fallback)
    rates = (0.1, 1e-8, -1)
    plain = weight.detach()
    torch.library.opcheck(triton_op.embedding_lookup, (weight, ids, *tables, torch.float32), {"concatenate": False})
    torch.library.opcheck(triton_op.embedding_lookup, (weight, ids, None, None, torch.float32), {"concatenate": True})
    torch.library.opcheck(triton_op.embedding_merge, (grad, ids, *tables, 20), {"concatenate": False})
    state = torch.ones(20)
    torch.library.opcheck(
        triton_op.embedding_update, (plain, state, grad, ids, *tables, *rates), {"concatenate": False}
    )
    torch.library.opcheck(triton_op.rowwise_adagrad, (plain, state, torch.arange(9), grad, *rates))


class Recorder:
    """Stands for a kernel: notes the constants of its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*given, num_warps, **constants):
            self.launches.add((self.kernel.fn.__name__, num_warps, *sorted(constants.items())))
            return self.kernel[grid](*given, num_warps=num_warps, **constants)

        return launch


def test_what_is_launched_is_what_check_compiles(monkeypatch):
    """Constants and warps of every launch, at a width that is compiled, are among those of `launched`."""
    compiled = {(one.kernel.fn.__name__, one.num_warps, *sorted(one.constants.items())) for one in triton_op.launched()}
    launches = set()
    for name in [name for name in vars(triton_op.kernels) if name.endswith("_kernel")]:
        monkeypatch.setattr(triton_op.kernels, name, Recorder(getattr(triton_op.kernels, name), launches))
    weight, layout = two_tables(64)
    weight, state = weight.nan_to_num().requires_grad_(), torch.ones(20)
    ids, grad = mixed_ids(30), torch.randn(30, 64)

    lookup_tables(weight, ids, layout, concatenate=True, impl="triton").sum().backward()
    fused_lookup(weight, ids.clamp(min=0), impl="triton")
    merge_table_gradients(grad, ids, layout, impl="triton")
    rowwise_adagrad(weight.detach(), state, torch.arange(20), torch.ones(20, 64), learning_rate=1.0, impl="triton")
    for settings in ({}, {"seed": 1}):
        half = weight.detach().bfloat16()
        update_tables(half, state, grad, ids, layout, learning_rate=1.0, impl="triton", **settings)

    assert len({launch[0] for launch in launches}) == 7
    assert launches <= compiled


def test_it_compiles_whole():
    """torch.compile finds one graph through the public function, forward and backward."""
    places = torch.randint(0, 6, (9, 2))
    values = torch.randn(6, 4, requires_grad=True)

    def loss(values):
        return fused_lookup(values, places, impl="triton").square().sum()

    (expected,) = torch.autograd.grad(loss(values), values)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(values), values)

    assert torch.equal(found, expected)


def test_what_does_not_fit_is_named():
    """Each check names what it got; nothing falls back."""
    weight, layout = two_tables(4)
    ids, state = mixed_ids(2), torch.zeros(20)
    with pytest.raises(ValueError, match=r"3 features over 19 rows .* \(2, 2\) .* \(20, 4\)"):
        lookup_tables(weight, ids[:, :2], layout)
    with pytest.raises(ValueError, match=r"fp32 and bf16 .*float64.* impl = 'reference'"):
        lookup_tables(weight.double(), ids, layout, impl="triton")
    with pytest.raises(ValueError, match="at most 2048"):
        fused_lookup(torch.zeros(1, 2049), torch.zeros(1, 1).long(), impl="triton")
    with pytest.raises(ValueError, match=r"gradient \(2, 5\) is not of a lookup of ids \(2, 3\)"):
        update_tables(weight, state, torch.zeros(2, 5), ids, layout, learning_rate=1.0)
    with pytest.raises(ValueError, match="contiguous weight"):
        rowwise_adagrad(weight.t(), torch.zeros(4), ids[:0, 0], torch.zeros(0, 20), learning_rate=1.0, impl="triton")
    with pytest.raises(ValueError, match="seed"):
        rowwise_adagrad(weight, state, ids[:0, 0], torch.zeros(0, 4), learning_rate=1.0, seed=3)
    with pytest.raises(ValueError, match="feature 0 has 2 known rows"):
        Layout.of([0], [2])
    with pytest.raises(ValueError, match="up to row 9"):
        Layout.of([0], [3], [torch.tensor([0, 1, 2, 9])])
