"""The interval attention kernels, interpreted on the CPU, against the reference in fp64: outputs and every gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.interval_attention import Decay, Silu, interval_attention, interval_attention_reference

HOUR_US = 3_600_000_000
# relative to the largest entry of what is compared; bf16: q, k, v, the output and each weight are rounded to 8 bits
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
KINDS = pytest.mark.parametrize("kind", ["softmax", "decay", "silu"])


@dataclasses.dataclass(frozen=True)
class Case:
    """Segments laid out as batches are: history, then targets that see history and themselves."""

    lo: Tensor
    hi: Tensor
    time: Tensor
    position: Tensor
    targets: Tensor

    @property
    def count(self) -> int:
        """Return T."""
        return len(self.lo)

    @property
    def itself(self) -> Tensor:
        """Return every token's own place."""
        return torch.arange(self.count)


def case(*segments: tuple[int, int], window: int = 10**9, ties: int = 1) -> Case:
    """Return segments of (history, targets); a token sees `window` keys at most, and none of its own `ties` tokens."""
    rng = np.random.default_rng(len(segments))
    lo, hi, time, position, targets = [], [], [], [], []
    for history, asked in segments:
        first = len(lo)
        for j in range(history + asked):
            end = j // ties * ties if j < history else history
            lo.append(first + max(end - window, 0))
            hi.append(first + end)
            position.append(min(j, history))
        time += np.sort(rng.integers(0, 3000 * HOUR_US, history + asked)).tolist()
        targets += range(first + history, first + history + asked)
    made = (torch.tensor(x, dtype=torch.int64) for x in (lo, hi, time, position, targets))
    return Case(*made)


def weighting_of(
    kind: str, rows: Tensor, made: Case, heads: int, dtype: torch.dtype = torch.float32
) -> Decay | Silu | None:
    """Return weights of a kind for some tokens as queries."""
    times = {"query_time": made.time[rows], "key_time": made.time}
    if kind == "softmax":
        return None
    if kind == "decay":
        return Decay(half_life_us=100.0 * HOUR_US, **times)
    generator = torch.Generator().manual_seed(7)
    position_bias, time_bias = (
        torch.randn(64, heads, generator=generator).to(dtype).requires_grad_() for _ in range(2)
    )
    return Silu(
        position_bias=position_bias,
        time_bias=time_bias,
        divisor=30.0,
        query_position=made.position[rows],
        key_position=made.position,
        **times,
    )


def run(
    made: Case, kind: str, dtype: torch.dtype, impl: str, *, heads: int = 2, dim: int = 16, rows: Tensor | None = None
) -> list[Tensor]:
    """Return the output and every gradient; the reference computes the same rounded inputs in fp64."""
    rows = made.itself if rows is None else rows
    inner = torch.float64 if impl == "reference" else dtype
    generator = torch.Generator().manual_seed(made.count)
    q, k, v, cotangent = (torch.randn(made.count, heads, dim, generator=generator).to(dtype) for _ in range(4))
    leaves = [x.to(inner).detach().requires_grad_() for x in (q[rows], k, v)]
    weighting = weighting_of(kind, rows, made, heads, torch.float64 if impl == "reference" else torch.float32)
    out = interval_attention(
        *leaves,
        made.lo[rows],
        made.hi[rows],
        made.itself[rows],
        weighting=weighting,
        impl=impl,  # type: ignore[arg-type]
    )
    biases = [weighting.position_bias, weighting.time_bias] if isinstance(weighting, Silu) else []
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *biases], cotangent[rows].to(inner))]


def assert_close(got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, *, least: float = 1e-3) -> None:
    """Compare outputs and gradients by the table of tolerances; `least`: of the largest entry, where it may be 0."""
    assert len(got) == len(expected)
    names = ("out", "grad q", "grad k", "grad v", "grad position bias", "grad time bias")
    for name, mine, theirs in zip(names, got, expected, strict=False):
        assert mine.shape == theirs.shape, name
        assert bool(torch.isfinite(mine).all()), name
        off = (mine.double() - theirs).abs().max() if mine.numel() else torch.tensor(0.0)
        largest = theirs.abs().max() if mine.numel() else 1.0
        assert float(off) <= TOLERANCES[dtype] * max(float(largest), least), (name, float(off), float(largest))


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill new buffers with NaN, so that what no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(mode=before)


@DTYPES
@KINDS
def test_segments_of_odd_lengths_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Tiles across history and targets, across segments, one-token segments and targets without history, all gradients."""
    made = case((1, 1), (60, 3), (0, 1), (0, 2), (63, 0), (70, 9))

    assert_close(run(made, kind, dtype, "triton"), run(made, kind, dtype, "reference"), dtype)


@pytest.mark.parametrize(
    ("count", "kind"),
    [(1, "softmax"), (1, "silu"), (63, "softmax"), (63, "decay"), (127, "silu"), (129, "softmax"), (129, "silu")],
)
def test_sizes_round_a_tile_equal_the_reference(count: int, kind: str) -> None:
    """One segment that ends just before, at and behind a tile's border, with a window that ends inside tiles."""
    made = case((count - 1, 1), window=50)

    got, expected = (run(made, kind, torch.float32, impl) for impl in ("triton", "reference"))

    assert_close(got, expected, torch.float32, least=1.0 if count == 1 else 1e-3)  # one key: softmax has no gradient


@DTYPES
@pytest.mark.parametrize(("lo", "hi"), [(0, 127), (1, 128), (0, 64), (33, 97)])
def test_a_window_that_ends_one_key_beside_a_tile_masks_that_key(lo: int, hi: int, dtype: torch.dtype) -> None:
    """128 queries of one interval: every key of a tile but its first, or its last, is seen by all."""
    zero = torch.zeros(128, dtype=torch.int64)
    made = Case(zero + lo, zero + hi, zero, zero, zero)

    got, expected = (run(made, "softmax", dtype, impl, heads=1) for impl in ("triton", "reference"))

    assert_close(got, expected, dtype)


def test_whole_tiles_without_a_mask_equal_the_reference() -> None:
    """1025 tokens of one head and a window of 200: between its edges tiles are seen whole and skip the mask."""
    made = case((1020, 5), window=200)

    got, expected = (run(made, "softmax", torch.float32, impl, heads=1) for impl in ("triton", "reference"))

    assert_close(got, expected, torch.float32)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("softmax", torch.bfloat16), ("decay", torch.float32), ("silu", torch.float32)]
)
def test_target_only_queries_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Fewer queries than keys, each with its own key outside its interval, and a window that leaves holes between them."""
    made = case((100, 2), (90, 1), (3, 3), (0, 1), window=20)

    got, expected = (run(made, kind, dtype, impl, rows=made.targets) for impl in ("triton", "reference"))

    assert_close(got, expected, dtype)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_tokens_of_one_time_see_what_was_before_all_of_them(kind: str) -> None:
    """Ties of five: hi is the same for all of them, and the own key lies behind it."""
    made = case((66, 4), ties=5)

    assert_close(run(made, kind, torch.float32, "triton"), run(made, kind, torch.float32, "reference"), torch.float32)


@KINDS
def test_a_query_with_nothing_to_see_mixes_itself(kind: str) -> None:
    """All intervals empty: softmax gives the own value, SiLU the own value by its weight; gradients agree."""
    made = case(*[(0, 1)] * 70)
    got, expected = (run(made, kind, torch.float32, impl) for impl in ("triton", "reference"))

    assert_close(got, expected, torch.float32, least=1.0)  # one key: softmax has no gradient
    if kind != "silu":
        assert torch.equal(got[0], run(made, "softmax", torch.float32, "triton")[0])


@pytest.mark.parametrize("dim", [5, 24])
def test_head_dims_between_powers_of_two_are_padded(dim: int) -> None:
    """5 and 24 entries a head: the blocks' other columns are neither read nor written."""
    made = case((30, 3), (40, 1))
    got, expected = (run(made, "silu", torch.float32, impl, dim=dim) for impl in ("triton", "reference"))

    assert_close(got, expected, torch.float32)


def test_own_keys_may_be_shared_and_may_lie_inside_the_interval() -> None:
    """All queries name one own key, which some see anyway: it counts once for each, and its gradient is the sum."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(70, 1, 16, generator=generator, requires_grad=True) for _ in range(3))
    lo, hi, itself = torch.zeros(70).long(), torch.arange(70), torch.full((70,), 40)
    out = interval_attention(q, k, v, lo, hi, itself, impl="triton")
    exact = interval_attention_reference(q.double(), k.double(), v.double(), lo, hi, itself)

    got, expected = (torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, exact))

    assert_close([out.detach(), *got], [exact.detach(), *(x.double() for x in expected)], torch.float32)


@KINDS
def test_nan_around_the_tokens_does_not_leak(kind: str) -> None:
    """Tokens inside a larger buffer of NaN, keys before the first and behind the last interval NaN: output is finite."""
    room = torch.full((200, 6, 16), math.nan)
    generator = torch.Generator().manual_seed(2)
    room[40:130] = torch.randn(90, 6, 16, generator=generator)
    q, k, v = (x.requires_grad_() for x in room[30:160].detach().split(2, dim=1))
    rows = torch.arange(10, 100)  # the tokens; keys are the buffer with ten NaN before and thirty behind
    made = case((125, 5))
    lo, hi = (rows - 20).clamp(min=10), rows
    weighting = weighting_of(kind, rows, made, 2)

    out = interval_attention(q[rows], k, v, lo, hi, rows, weighting=weighting, impl="triton")
    found = torch.autograd.grad(out.sum(), (q, k, v))

    assert bool(torch.isfinite(out).all())
    for grad in found:
        assert bool(torch.isfinite(grad[rows]).all())
        assert int(grad[:10].count_nonzero()) == int(grad[100:].count_nonzero()) == 0


def test_other_users_values_change_nothing() -> None:
    """Another segment's queries, keys and values are exactly without effect, though they share its tiles."""
    made = case((20, 2), (20, 2))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(44, 1, 16, generator=generator) for _ in range(3))
    weighting = weighting_of("silu", made.itself, made, 1)
    for weights in (None, weighting):
        first = interval_attention(q, k, v, made.lo, made.hi, made.itself, weighting=weights, impl="triton")
        others = [torch.cat([x[:22], 2 * x[22:] + 1]) for x in (q, k, v)]
        again = interval_attention(*others, made.lo, made.hi, made.itself, weighting=weights, impl="triton")
        assert torch.equal(first[:22], again[:22])
        assert not torch.equal(first[22:], again[22:])


def test_rows_of_a_wider_matrix_are_read_where_they_are() -> None:
    """Queries and keys that are halves of one matrix, as the blocks give them, give the values of copies."""
    made = case((40, 4))
    generator = torch.Generator().manual_seed(4)
    qk, v = torch.randn(44, 4, 16, generator=generator), torch.randn(44, 2, 16, generator=generator)
    q, k = qk.chunk(2, dim=1)

    got = interval_attention(q, k, v, made.lo, made.hi, made.itself, impl="triton")

    assert torch.equal(got, interval_attention(q.clone(), k.clone(), v, made.lo, made.hi, made.itself, impl="triton"))


def test_no_queries_and_no_keys_give_empty_results_and_zero_gradients() -> None:
    """N = 0 with keys, and N = T = 0."""
    for keys in (0, 3):
        q = torch.randn(0, 2, 16, requires_grad=True)
        k, v = (torch.randn(keys, 2, 16, requires_grad=True) for _ in range(2))
        none = torch.zeros(0).long()
        out = interval_attention(q, k, v, none, none, none, impl="triton")
        found = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.shape == (0, 2, 16)
        assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(found, (q, k, v), strict=True))


def test_gradients_are_the_same_from_run_to_run() -> None:
    """Nothing is added in an order that may change: bits agree."""
    made = case((9, 2))

    for first, again in zip(
        run(made, "silu", torch.float32, "triton"), run(made, "silu", torch.float32, "triton"), strict=True
    ):
        assert torch.equal(first, again)


@KINDS
def test_opcheck_and_a_whole_graph(kind: str) -> None:
    """torch.library's own checks of schema, fake and autograd, and torch.compile without a graph break."""
    made = case((9, 2))
    q, k, v = (torch.randn(11, 1, 16, requires_grad=True) for _ in range(3))
    weighting = weighting_of(kind, made.itself, made, 1)
    times = (None, None) if weighting is None else (made.time, made.time)
    silu = isinstance(weighting, Silu)
    places = (made.position.int(), made.position.int()) if silu else (None, None)
    biases = (weighting.position_bias, weighting.time_bias) if isinstance(weighting, Silu) else (None, None)
    intervals = (made.lo.int(), made.hi.int(), made.itself.int())
    torch.library.opcheck(
        torch.ops.gr.interval_attention.default, (q, k, v, *intervals, *times, *places, *biases, float(HOUR_US), 30.0)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return interval_attention(q, k, v, made.lo, made.hi, made.itself, weighting=weighting, impl="triton").square()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, attend))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
