"""The Triton kernels of bucketed AUC, interpreted, against the fp64 reference: both ways of counting, exact to the bin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.bucketed_auc import BucketedAUC, triton_op

KERNELS = ["shared", "scatter"]
DTYPES = [torch.float32, torch.bfloat16]
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 1e-6}
"""Of a sum: both dtypes are exact in the kernel's fp32, so the terms' arithmetic is all that differs."""


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch) -> str:
    """Force one way of counting; blocks are as small as they may be, so that several programs and blocks take part."""
    monkeypatch.setattr(triton_op, "SHARED_ATOMICS", request.param == "shared")
    monkeypatch.setattr(triton_op, "_SHARED_BLOCK", 128)
    monkeypatch.setattr(triton_op, "_SHARED_BLOCKS", 3)
    monkeypatch.setattr(triton_op, "_SHARED_BINS", (4, 16_384))
    monkeypatch.setattr(triton_op, "_SCATTER_SCORES", 256)
    monkeypatch.setattr(triton_op, "_COPIES", 3)
    return request.param


def rows(num_rows: int, num_actions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of which some are clipped, rare labels, and a known mask; what is not known is NaN."""
    torch.manual_seed(num_rows * 10 + num_actions)
    logits = (6 * torch.randn(num_rows, num_actions)).to(dtype)
    labels = torch.rand(num_rows, num_actions) < 0.2
    known = torch.rand(num_rows, num_actions) < 0.7
    logits[~known] = math.nan
    return logits, labels, known


def both(*updates: tuple[Tensor | None, ...], num_actions: int, **settings: object) -> tuple[BucketedAUC, BucketedAUC]:
    """Return what the kernel and the reference made of the same updates."""
    made = tuple(BucketedAUC(num_actions, impl=impl, **settings) for impl in ("triton", "reference"))
    for update in updates:
        for metrics in made:
            metrics.update(*update)
    return made


def assert_same(got: BucketedAUC, expected: BucketedAUC, relative: float = RELATIVE[torch.float32]) -> None:
    """Counts are equal, sums nearly."""
    for name, counts in expected.state().items():
        if name != "sums_A4":
            assert torch.equal(got.state()[name], counts), name
    assert torch.equal(got.sums_A4[:, 2:], expected.sums_A4[:, 2:])
    torch.testing.assert_close(got.sums_A4[:, :2], expected.sums_A4[:, :2], rtol=relative, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_actions", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 63, 127, 129, 1025])
def test_counts_are_the_references(kernel, num_rows, num_actions, dtype):
    """Histograms, clipped and rows to the last one, loss and probability nearly, at every size; unknown NaNs do not leak."""
    got, expected = both(rows(num_rows, num_actions, dtype), num_actions=num_actions)

    assert_same(got, expected, RELATIVE[dtype])
    assert not got.sums_A4.isnan().any()


def test_updates_accumulate(kernel):
    """A second update adds to the first: what lies between them (tickets, copies) is as at the start."""
    got, expected = both(rows(500, 3), rows(700, 3), num_actions=3)

    assert_same(got, expected)
    assert got._scratch is not None
    assert not got._scratch.any()


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8], ids=str)
def test_rows_not_supervised_count_nowhere(kernel, mask_dtype):
    """A row whose supervise is 0 changes nothing, known or not, even with NaN logits; any other code counts."""
    logits, labels, known = rows(300, 3)
    supervise = torch.randint(0, 3, (300,)).to(mask_dtype)
    logits[supervise == 0] = math.nan

    got, expected = both((logits, labels, known, supervise), num_actions=3)
    kept = supervise != 0
    (_, subset) = both((logits[kept], labels[kept], known[kept]), num_actions=3)

    assert_same(got, expected)
    assert_same(got, subset)


@pytest.mark.parametrize("num_cohorts", [1, 4])
def test_cohorts_count_apart(kernel, num_cohorts):
    """Each cohort's rows are its own; those outside [0, C) count nowhere; together they are one pass."""
    logits, labels, known = rows(400, 3)
    cohort = torch.randint(-1, 5, (400,), dtype=torch.int32)
    update = (logits, labels, known, torch.rand(400) < 0.8, cohort)

    got, expected = both(update, num_actions=3, num_cohorts=num_cohorts)

    assert_same(got, expected)
    for c in range(num_cohorts):
        own = cohort == c
        _, alone = both(tuple(part[own] for part in update[:4]), num_actions=3)
        assert_same_metrics(got.compute(c), alone.compute())
    within = (cohort >= 0) & (cohort < num_cohorts)
    _, together = both(tuple(part[within] for part in update[:4]), num_actions=3)
    assert_same_metrics(got.compute(), together.compute())


def assert_same_metrics(got: list, expected: list) -> None:
    """Metrics are those of equal counts."""
    for one, other in zip(got, expected, strict=True):
        assert (one.auc, one.certificate, one.count, one.clipped) == (
            other.auc,
            other.certificate,
            other.count,
            other.clipped,
        )
        assert one.ne == pytest.approx(other.ne, rel=2e-6)
        assert one.calibration == pytest.approx(other.calibration, rel=2e-6)


@pytest.mark.parametrize("values", [[0.3], [-2.0, 1.5], [-1e30, 1e30]], ids=str)
def test_ties_are_counted_each(kernel, values):
    """All equal scores, or two values, in range or clipped: every row is counted in its bin, none lost to another's."""
    labels = torch.arange(900)[:, None] % 7 == 0
    logits = torch.tensor(values).repeat(900)[:900, None].contiguous()

    got, expected = both((logits, labels, torch.ones_like(labels)), num_actions=1)

    assert_same(got, expected)
    assert int(got.positives_AB.sum() + got.negatives_AB.sum()) == 900


def test_edges_fall_to_the_right(kernel):
    """A logit on a bin's edge lies right of it and its neighbours in fp32 on their own side: all edges, bit for bit."""
    edges = torch.arange(-16, 16.01, 1 / 256)
    toward = torch.full_like(edges, math.inf)
    logits = torch.cat([edges, torch.nextafter(edges, toward), torch.nextafter(edges, -toward)])
    logits = torch.cat([logits, torch.tensor([-0.0, -1e-30, 1e-30, math.inf, -math.inf])])[:, None]
    labels = torch.zeros_like(logits, dtype=torch.bool)
    labels[-2] = True  # the reference's log loss of +inf and of a negative is infinite
    labels[logits > 0] = True

    got, expected = both((logits[:-2], labels[:-2], torch.ones_like(labels[:-2])), num_actions=1)

    assert_same(got, expected)
    assert int(got.negatives_AB[0, 4095]) == int(expected.negatives_AB[0, 4095]) > 0


@pytest.mark.parametrize("known", [False, True])
def test_masked_out_is_nothing_and_infinities_are_clipped(kernel, known):
    """All rows masked leave every count as it was; known infinities with their own label lose nothing and are clipped."""
    logits = torch.tensor([[math.inf], [-math.inf]])
    labels = torch.tensor([[True], [False]])
    got = BucketedAUC(1, impl="triton")
    got.update(logits, labels, torch.full_like(labels, known))

    assert got.clipped_A.tolist() == [2 * known]
    assert got.sums_A4.tolist() == [[0.0, 1.0 * known, 1.0 * known, 2.0 * known]]


def test_a_known_nan_shows_in_its_action_only(kernel):
    """It falls into no bin and is no row; loss and probability of its action, and of no other, are NaN."""
    logits, labels, known = rows(200, 3)
    logits[5, 1], known[5, 1] = math.nan, True

    got, expected = both((logits, labels, known), num_actions=3)

    assert_same(got, expected)
    assert got.sums_A4[:, 0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("layout", ["columns of a wider one", "every second row", "transposed", "expanded"])
def test_strides_are_followed(kernel, layout):
    """Views count as their contiguous copies do."""
    wide = rows(600, 5)
    views = {
        "columns of a wider one": lambda t: t[:, 1:4],
        "every second row": lambda t: t[::2, :3],
        "transposed": lambda t: t[:300, :3].t().contiguous().t(),
        "expanded": lambda t: t[:1, :3].expand(50, 3),
    }
    update = tuple(views[layout](part) for part in wide)

    got, expected = both(update, num_actions=3)

    assert_same(got, expected)


def test_small_losses_are_not_lost(kernel):
    """log1p holds its relative accuracy where exp(-|x|) is far below 1's spacing: confident, right scores."""
    logits = torch.linspace(-40, -8, 500)[:, None]

    got, expected = both((logits, torch.zeros(500, 1).bool(), torch.ones(500, 1).bool()), num_actions=1)

    assert_same(got, expected, 3e-6)  # exp of fp32 is off by |x| * 2^-24


def test_sums_do_not_depend_on_the_order_of_programs(kernel, monkeypatch):
    """The same rows in other programs (more processors) give the same sums bit for bit."""
    update = rows(1000, 3)
    one, _ = both(update, num_actions=3)
    monkeypatch.setattr(triton_op, "_processors", lambda _: 100)
    other, _ = both(update, num_actions=3)

    assert torch.equal(one.sums_A4, other.sums_A4)


@pytest.mark.parametrize("bins", [(8, -2, 2), (16, -4, 4)], ids=str)
def test_other_bins(kernel, bins):
    """Other powers of two of bins over other ranges."""
    num_bins, low, high = bins

    got, expected = both(rows(300, 2), num_actions=2, num_bins=num_bins, low=low, high=high)

    assert_same(got, expected)


def test_sixteen_bits_do_not_overflow(monkeypatch):
    """Two full programs of equal scores, one of negatives and one of positives, are counted to the last row."""
    monkeypatch.setattr(triton_op, "SHARED_ATOMICS", True)
    num_rows = triton_op._SHARED_BLOCK * triton_op._SHARED_BLOCKS * 2
    assert triton_op._SHARED_BLOCK * triton_op._SHARED_BLOCKS <= 65_535
    monkeypatch.setattr(triton_op, "_processors", lambda _: 1)
    labels = torch.arange(num_rows)[:, None] >= num_rows // 2

    got, expected = both((torch.zeros(num_rows, 1), labels, torch.ones_like(labels)), num_actions=1)

    assert_same(got, expected)


def test_what_cannot_be_counted_exactly_is_refused():
    """Bins that fp32 cannot find, fp64 logits and 2^31 rows raise and change nothing; a mask's shape is named."""
    odd = BucketedAUC(1, num_bins=10, impl="triton")
    with pytest.raises(ValueError, match="power of two"):
        odd.update(torch.zeros(3, 1), torch.zeros(3, 1).bool(), torch.ones(3, 1).bool())
    fine = BucketedAUC(1, impl="triton")
    with pytest.raises(ValueError, match="float64"):
        fine.update(torch.zeros(3, 1).double(), torch.zeros(3, 1).bool(), torch.ones(3, 1).bool())
    many, none = torch.zeros(1, 1).expand(2**31, 1), torch.zeros(1, 1).bool().expand(2**31, 1)
    with pytest.raises(ValueError, match=r"2\^31 rows"):
        fine.update(many, none, none)
    with pytest.raises(ValueError, match=r"supervise .*\(3, 1\).*\(2,\)"):
        fine.update(torch.zeros(3, 1), torch.zeros(3, 1).bool(), torch.ones(3, 1).bool(), torch.ones(2).bool())
    assert not any(counts.any() for counts in (odd.state() | fine.state()).values())


def test_offsets_past_two_to_the_31(kernel, monkeypatch):
    """Logits, labels and known that lie 2^31 elements and more behind the first are read where they are."""
    row, num_rows = 2**29, 6
    monkeypatch.setattr(triton_op, "_MAX_ROW_STRIDE", row)
    storage = torch.empty(
        2 * row * num_rows, dtype=torch.bool
    )  # 6 GiB of addresses; pages that nobody touches cost nothing
    logits = storage.view(torch.bfloat16).as_strided((num_rows, 1), (row, 1))
    known, labels = (storage.as_strided((num_rows, 1), (row, 1), offset) for offset in (2, 3))
    logits.copy_(torch.arange(num_rows)[:, None] - 2)
    known.copy_(torch.arange(num_rows)[:, None] > 2)
    labels.copy_(torch.arange(num_rows)[:, None] == num_rows - 1)

    got, expected = both((logits, labels, known), num_actions=1)

    assert_same(got, expected)
    assert got.sums_A4[0, 2:].tolist() == [1.0, 3.0]


def arguments(num_cohorts: int) -> tuple:
    """Return arguments of the op over 200 rows of 3 actions."""
    metrics = BucketedAUC(3, num_cohorts=num_cohorts)
    scratch = triton_op.new_scratch(num_cohorts, 3, metrics.num_bins, torch.device("cpu"))
    supervise, cohort = torch.rand(200) < 0.5, torch.randint(0, num_cohorts, (200,), dtype=torch.int32)
    return (*metrics.state().values(), scratch, *rows(200, 3), supervise, cohort, -16.0, 16.0)


def test_opcheck():
    """The op's schema, fake and dispatch are what torch.library asks for."""
    torch.library.opcheck(torch.ops.gr.bucketed_auc.default, arguments(2))


def test_compiled_without_graph_breaks(kernel):
    """torch.compile traces through an update as a whole, and the counts are those of the reference."""
    got, expected = (BucketedAUC(3, num_cohorts=2, impl=impl) for impl in ("triton", "reference"))
    update = (*rows(200, 3), torch.rand(200) < 0.5, torch.randint(0, 2, (200,), dtype=torch.int32))

    @torch.no_grad()
    def count(*values: Tensor) -> Tensor:
        got.update(*values)
        return values[0] * 1.0

    compiled = torch.compile(count, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(*update)
        expected.update(*update)

    assert_same(got, expected)
