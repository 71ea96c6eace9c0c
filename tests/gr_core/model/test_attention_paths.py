"""Every attention path against the dense reference in fp64: window, decay, odd lengths, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gr_core.data.intervals import Limits, lay_out
from gr_core.model.attention import Layout, plan_bucketed, plan_dense
from gr_core.model.attention import varlen as varlen_path
from gr_core.model.attention.flex import FlexPlan, block_mask, plan_flex
from gr_core.model.attention.plan import AttentionPlan
from gr_core.model.attention.tiles import TILE, Blocks, Tiles
from gr_core.model.attention.varlen import causal_runs, plan_varlen

DAY_US = 86_400_000_000
F10_LENGTHS = (1, 127, 128, 129, 1025)
BUDGET = 1536


def layout(
    lengths: tuple[int, ...], *, window_days: float | None = None, half_life_days: float | None = None
) -> Layout:
    """Lay users out as packs do: history over 30 days, then up to nine targets."""
    rng = np.random.default_rng(len(lengths))
    targets = [min(length, 1 + length % 9) for length in lengths]
    history = [length - count for length, count in zip(lengths, targets, strict=True)]
    seen = np.concatenate([np.sort(rng.integers(0, 30 * DAY_US, n)) for n in history])
    # after all history, so that no target's segment is shorter than its user
    asked = np.concatenate([np.sort(rng.integers(30 * DAY_US, 31 * DAY_US, n)) for n in targets])
    limits = Limits(
        max_history=2000,
        max_targets=64,
        max_age_us=365 * DAY_US,
        token_budget=4096,
        time_window_us=None if window_days is None else int(window_days * DAY_US),
    )
    history_starts, target_starts = (np.concatenate([[0], np.cumsum(n)]) for n in (history, targets))
    made = lay_out(seen, history_starts, asked, target_starts, limits)
    starts = np.concatenate([[0], np.cumsum(made.lengths)])
    base = np.repeat(starts[:-1], made.lengths)
    time = np.empty(len(made.source), np.int64)
    time[made.is_target], time[~made.is_target] = asked[made.source[made.is_target]], seen[made.source[~made.is_target]]
    return Layout(
        segment_starts=starts,
        lo=made.lo + base,
        hi=made.hi + base,
        targets=np.flatnonzero(made.is_target),
        time=time,
        position=made.position.astype(np.int64),
        half_life_us=None if half_life_days is None else half_life_days * DAY_US,
    )


SETTINGS = {
    "plain": {},
    "window": {"window_days": 4.0},
    "decay": {"half_life_days": 2.0},
    "window and decay": {"window_days": 4.0, "half_life_days": 2.0},
}


def heads(count: int, dtype: torch.dtype = torch.float64, dim: int = 8) -> list[Tensor]:
    """Return queries, keys and values of all tokens."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, 2, dim, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)]


def both(plan: AttentionPlan, made: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what all tokens and what targets alone get, end to end."""
    targets = torch.from_numpy(made.targets)
    return torch.cat([plan.attend(torch.cat([q, k], dim=1), v), plan.attend_targets(q[targets], k, v)])


@pytest.fixture
def eager_flex() -> Iterator[None]:
    """Let FlexAttention run uncompiled without its advice to compile it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("one_bucket", [False, True], ids=["buckets", "one bucket"])
def test_f10_bucketed_equals_dense_with_gradients(settings: dict[str, float], one_bucket: bool) -> None:  # noqa: FBT001
    """Case F10, lengths round a tile's border, window and decay: values and all gradients to 1e-6 (decay is held in fp32)."""
    made = layout(F10_LENGTHS, **settings)
    q, k, v = heads(len(made.lo))
    expected = both(plan_dense(made), made, q, k, v)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), cotangent)

    got = both(plan_bucketed(made, one_bucket=one_bucket), made, q, k, v)

    assert torch.allclose(got, expected, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), cotangent), wanted, strict=True):
        assert bool(torch.isfinite(mine).all())
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_bucketed_computes_no_key_that_no_query_of_a_piece_sees() -> None:
    """Plain history attends causally without a mask, and a window cuts old keys off; pieces cover all queries once."""
    made = layout((1025,))
    history = 1025 - 9
    (plain,) = plan_bucketed(made).full
    made.lo[:] = np.maximum(np.arange(1025) - 100, 0)
    (window,) = plan_bucketed(made).full

    assert [(p.queries, p.keys, p.mask is None) for p in plain.pieces] == [
        ((0, history), (0, history), True),
        ((history, 1025), (0, 1025), False),
    ]
    assert [(p.queries, p.keys) for p in window.pieces] == [
        ((0, 256), (0, 256)),
        ((256, 512), (156, 512)),
        ((512, 768), (412, 768)),
        ((768, 1025), (668, 1025)),
    ]


def test_bucketed_leaves_segments_without_targets_out_of_the_targets() -> None:
    """A bucket of history alone has no query of its own at the top, and no kernel is called without a key."""
    made = layout((40, 300))
    last = made.targets[made.targets >= 40]
    only = Layout(segment_starts=made.segment_starts, lo=made.lo, hi=made.hi, targets=last)
    q, k, v = (x.detach() for x in heads(len(made.lo)))

    plan = plan_bucketed(only)

    assert all(piece.keys[0] < piece.keys[1] for bucket in plan.top for piece in bucket.pieces)
    assert torch.allclose(both(plan, only, q, k, v), both(plan_dense(only), only, q, k, v), atol=1e-6)


@pytest.mark.parametrize("targets", [[2], []], ids=["one target", "no target"])
def test_bucketed_takes_empty_segments_and_batches_without_a_target(targets: list[int]) -> None:
    """A segment without a token, and a batch that asks nothing, are laid out as dense does, gradients too."""
    made = Layout(
        segment_starts=np.array([0, 0, 3, 3]),
        lo=np.zeros(3, np.int64),
        hi=np.array([0, 1, 2]),
        targets=np.array(targets, np.int64),
    )
    q, k, v = heads(3)

    got = both(plan_bucketed(made), made, q, k, v)
    expected = both(plan_dense(made), made, q, k, v)

    assert torch.allclose(got, expected, atol=1e-6)
    gradients = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, expected)]
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("change", ["tie", "late target", "short history", "window"])
def test_bucketed_equals_dense_where_a_history_is_not_plainly_causal(change: str) -> None:
    """Two history tokens of one time, a target that sees less, a history cut off by age: no causal kernel, same values."""
    made = layout((700, 299))
    if change == "tie":
        made.hi[140] = made.hi[139]
    elif change == "late target":
        made.hi[made.targets[0]] -= 20
    elif change == "short history":
        made.lo[100:200] = 5
    else:
        made.lo[:700] = np.maximum(np.arange(700) - 100, 0)
    q, k, v = heads(len(made.lo))
    expected = both(plan_dense(made), made, q, k, v)
    cotangent = torch.randn_like(expected)

    plan = plan_bucketed(made)
    got = both(plan, made, q, k, v)

    causal = sum(piece.mask is None for bucket in plan.full for piece in bucket.pieces)
    assert causal == (2 if change == "late target" else 1), "the other user's history is plain"
    assert torch.allclose(got, expected, atol=1e-6)
    wanted = torch.autograd.grad(expected, (q, k, v), cotangent)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), cotangent), wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_f10_bucketed_in_lower_precision(settings: dict[str, float], dtype: torch.dtype, most: float) -> None:
    """Case F10's tolerances: finite and within 2e-2 (bf16) and 1e-4 (fp32) of fp64, values and all gradients."""
    made = layout(F10_LENGTHS, **settings)
    exact = heads(len(made.lo), dim=16)
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    expected = both(plan_dense(made), made, *exact)
    cotangent = torch.randn_like(expected)
    wanted = [expected.detach(), *torch.autograd.grad(expected, exact, cotangent)]

    found = both(plan_bucketed(made), made, *rounded)
    got = [found.detach(), *torch.autograd.grad(found, rounded, cotangent.to(dtype))]

    for mine, theirs in zip(got, wanted, strict=True):
        assert bool(torch.isfinite(mine).all())
        assert float((mine.double() - theirs).abs().max() / theirs.abs().max()) <= most


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("settings", [{}, SETTINGS["window and decay"]], ids=["plain", "window and decay"])
def test_f10_flex_equals_dense(settings: dict[str, float]) -> None:
    """FlexAttention's predicate and score change give the dense values."""
    made = layout(F10_LENGTHS, **settings)
    q, k, v = (x.detach() for x in heads(len(made.lo)))
    expected = both(plan_dense(made), made, q, k, v)

    got = both(plan_flex(made, token_budget=BUDGET), made, q, k, v)

    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.usefixtures("eager_flex")
def test_a_batch_beyond_the_budget_is_padded_to_its_own_tiles() -> None:
    """More tokens than the budget still all attend."""
    made = layout((100, 129))
    q, k, v = (x.detach() for x in heads(len(made.lo)))

    got = both(plan_flex(made, token_budget=128), made, q, k, v)

    assert torch.allclose(got, both(plan_dense(made), made, q, k, v), atol=1e-5)


def test_decay_halves_a_keys_weight_each_half_life() -> None:
    """Two keys of equal scores, one a half-life older: its weight is half the other's."""
    made = Layout(
        segment_starts=np.array([0, 3]),
        lo=np.zeros(3, np.int64),
        hi=np.array([0, 1, 2]),
        targets=np.array([2]),
        time=np.array([0, 2 * DAY_US, 4 * DAY_US]),
        half_life_us=2.0 * DAY_US,
    )
    zeros = torch.zeros(3, 1, 4, dtype=torch.float64)
    value = torch.eye(3, 4, dtype=torch.float64)[:, None]

    got = plan_bucketed(made).attend(torch.cat([zeros, zeros], dim=1), value)[2, 0, :3]

    assert torch.allclose(got, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) / 7)


def dense_of(blocks: Blocks) -> np.ndarray:
    """Return which (row tile, column block) are listed, as bools."""
    count, index = blocks.count[0, 0].numpy(), blocks.index[0, 0].numpy()
    found = np.zeros(index.shape, bool)
    for row, number in enumerate(count):
        assert sorted(set(index[row, :number])) == index[row, :number].tolist(), "ascending, each once"
        found[row, index[row, :number]] = True
    return found


def cells(tiles: Tiles, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return of every (query tile, key block) whether some and whether all of its pairs attend, by the definition."""
    key = np.arange(num_keys)
    lo, hi, itself = (x.numpy()[:, None] for x in (tiles.lo, tiles.hi, tiles.itself))
    mask = ((key >= lo) & (key < hi)) | (key == itself)
    blocked = mask.reshape(len(lo) // TILE, TILE, num_keys // TILE, TILE)
    return blocked.any(axis=(1, 3)), blocked.all(axis=(1, 3))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tiles_hold_every_pair_and_little_else(settings: dict[str, float]) -> None:
    """Every block with a pair is listed; full ones have no masked pair; those in vain are few; backward's lists agree."""
    made = layout((*F10_LENGTHS, 300, 700, 40), **settings)
    for rows in (plan_flex(made, token_budget=4096).full, plan_flex(made, token_budget=4096).top):
        partial, full = dense_of(rows.tiles.partial), dense_of(rows.tiles.full)
        some, every = cells(rows.tiles, partial.shape[1] * TILE)

        assert not (partial & full).any()
        assert ((partial | full) >= some).all()
        assert (full <= every).all()
        assert (partial | full).sum() <= 1.1 * some.sum()
        assert (dense_of(rows.tiles.partial_by_key) == partial.T).all()
        assert (dense_of(rows.tiles.full_by_key) == full.T).all()


def test_a_long_plain_history_has_full_blocks() -> None:
    """Below the diagonal of one long segment nothing is masked: those blocks skip the predicate."""
    tiles = plan_flex(layout((1025,)), token_budget=1152).full.tiles

    assert tiles.full.count[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_the_block_mask_is_what_torch_makes_of_the_predicate() -> None:
    """Without a window the blocks listed are those that torch finds by asking the predicate over T x T."""
    from torch.nn.attention.flex_attention import create_block_mask

    tiles = plan_flex(layout(F10_LENGTHS), token_budget=BUDGET).full.tiles
    mine = block_mask(tiles)
    theirs = create_block_mask(mine.mask_mod, None, None, len(tiles.lo), len(tiles.lo), device="cpu")

    assert torch.equal(mine.to_dense(), theirs.to_dense())


def test_f18_sixty_batches_of_other_lengths_have_the_same_shapes() -> None:
    """Shapes follow the token budget: one for all tokens, two for targets, so at most three graphs."""
    shapes: dict[str, set[tuple[tuple[int, ...], ...]]] = {"full": set(), "top": set()}
    for number in range(60):
        plan: FlexPlan = plan_flex(layout((1 + number, 7, 20 + 9 * number)), token_budget=1024)
        for name, rows in (("full", plan.full), ("top", plan.top)):
            shapes[name].add(tuple(tuple(tensor.shape) for tensor in _tensors(rows.tiles)))

    assert len(shapes["full"]) == 1
    assert len(shapes["top"]) <= 2


def _tensors(tiles: Tiles) -> list[Tensor]:
    return [tiles.lo, tiles.hi, tiles.itself, tiles.partial.index, tiles.full.index, tiles.full_by_key.index]


def reference_causal(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Stand in for FlashAttention, which runs on CUDA alone: causal softmax attention, run by run."""
    parts = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert 0 < end - begin <= longest
        run = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*run, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("settings", [{}, {"window_days": 4.0}], ids=["plain", "window"])
def test_varlen_and_flex_together_equal_dense(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plainly causal runs by one kernel and the rest by the other are put together as the dense values."""
    monkeypatch.setattr(varlen_path, "causal_attention", reference_causal)
    made = layout(F10_LENGTHS, **settings)
    q, k, v = (x.detach() for x in heads(len(made.lo)))

    got = both(plan_varlen(made, token_budget=BUDGET), made, q, k, v)

    assert torch.allclose(got, both(plan_dense(made), made, q, k, v), atol=1e-6)


def test_the_plainly_causal_run_of_a_segment_ends_where_a_token_sees_less() -> None:
    """All history and the first target that sees all of it, without a window; with one, what fits into it."""
    plain, window = layout((129,)), layout((129,), window_days=4.0)

    history = 129 - len(plain.targets)
    assert causal_runs(plain).tolist() == [history + 1]
    assert 0 < causal_runs(window)[0] < history


def test_the_first_target_of_every_segment_is_plainly_causal_without_history() -> None:
    """A segment of targets alone has one token that sees all before it: nothing."""
    made = Layout(
        segment_starts=np.array([0, 3, 4]),
        lo=np.array([0, 0, 0, 3]),
        hi=np.array([0, 0, 0, 3]),
        targets=np.arange(4),
    )

    assert causal_runs(made).tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_f10_flex_on_cuda_equals_dense_with_gradients(
    settings: dict[str, float], dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled FlexAttention, forward and backward, against the dense reference in fp64 (case F10)."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    made = layout(F10_LENGTHS, **settings)
    _on_cuda(plan_flex(made, token_budget=BUDGET), made, dtype, atol)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"window_days": 4.0}], ids=["plain", "window"])
def test_f10_varlen_on_cuda_equals_dense_with_gradients(settings: dict[str, float]) -> None:
    """FlashAttention on plainly causal runs and FlexAttention on the rest, forward and backward."""
    made = layout(F10_LENGTHS, **settings)
    _on_cuda(plan_varlen(made, token_budget=BUDGET), made, torch.bfloat16, 2e-2)


def _on_cuda(plan: AttentionPlan, made: Layout, dtype: torch.dtype, atol: float) -> None:
    exact = [x.detach().to(dtype).double().requires_grad_() for x in heads(len(made.lo), dim=32)]
    expected = both(plan_dense(made), made, *exact)
    cotangent = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, exact, cotangent.double())
    given = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    on_device = plan.map(lambda tensor: tensor.to("cuda"))
    targets = torch.from_numpy(made.targets).cuda()
    q, k, v = given

    got = torch.cat([on_device.attend(torch.cat([q, k], dim=1), v), on_device.attend_targets(q[targets], k, v)])
    found = torch.autograd.grad(got, given, cotangent.cuda())

    for mine, theirs in zip((got, *found), (expected, *wanted), strict=True):
        scale = theirs.abs().max().clamp(min=1.0)
        assert bool(torch.isfinite(mine).all())
        assert ((mine.cpu().double() - theirs).abs().max() / scale) < atol
