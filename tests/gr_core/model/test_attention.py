"""Bucketed SDPA against the dense reference, values and gradients, and the size of its padding."""

import numpy as np
import pytest
import torch

from gr_core.model.attention import Layout, plan_bucketed
from kernels.interval_attention import interval_attention

CASES = {
    "one token": [(0, 1)],
    "no history": [(0, 3), (0, 1)],
    "odd lengths": [(1, 1), (62, 1), (60, 3), (120, 9), (0, 2), (126, 3)],
    "a batch": [(h, 1 + h % 5) for h in range(0, 64, 3)],
}


def make(sizes, dtype=torch.float64):
    starts, lo, hi, targets = [0], [], [], []
    rng = np.random.default_rng(len(sizes))
    for history, count in sizes:
        begin = starts[-1]
        seen = np.sort(rng.integers(0, history + 1, count))
        hi += [begin + j for j in range(history)] + (begin + seen).tolist()
        lo += [begin + max(0, j - 40) for j in range(history)] + (begin + np.maximum(seen - 40, 0)).tolist()
        targets += range(begin + history, begin + history + count)
        starts.append(begin + history + count)
    starts, lo, hi, targets = (np.asarray(x, np.int64) for x in (starts, lo, hi, targets))
    layout = Layout(segment_starts=starts, lo=lo, hi=hi, targets=targets)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(starts[-1], 2, 4, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3))
    return layout, q, k, v


@pytest.mark.parametrize("one_bucket", [False, True], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_attend_equals_the_reference_with_gradients(sizes, one_bucket):
    """All tokens as queries: output and all three gradients agree with the dense reference to 1e-10 in fp64."""
    layout, q, k, v = make(sizes)
    plan = plan_bucketed(layout, one_bucket=one_bucket)
    cotangent = torch.randn_like(q)
    dense = interval_attention(
        q, k, v, torch.from_numpy(layout.lo), torch.from_numpy(layout.hi), torch.arange(len(layout.lo))
    )
    expected = torch.autograd.grad(dense, (q, k, v), cotangent)

    got = plan.attend(torch.cat([q, k], dim=1), v)

    assert torch.allclose(got, dense, atol=1e-10)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), cotangent), expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_attend_targets_equals_the_reference_with_gradients(sizes):
    """Targets only as queries: the same rows as with all queries, and the same gradients."""
    layout, q, k, v = make(sizes)
    plan = plan_bucketed(layout)
    at = torch.from_numpy(layout.targets)
    query = q.detach()[at].requires_grad_()
    dense = interval_attention(query, k, v, torch.from_numpy(layout.lo)[at], torch.from_numpy(layout.hi)[at], at)
    cotangent = torch.randn_like(query)
    expected = torch.autograd.grad(dense, (query, k, v), cotangent)

    got = plan.attend_targets(query, k, v)

    assert torch.allclose(got, dense, atol=1e-10)
    for mine, theirs in zip(torch.autograd.grad(got, (query, k, v), cotangent), expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_only_attention_is_padded_and_by_less_than_twice():
    """Over segments of 1 to 192 tokens, the padded places are fewer than twice the tokens; every place is used once."""
    rng = np.random.default_rng(0)
    layout, *_ = make([(int(h), 1) for h in rng.integers(0, 192, 150)])

    plan = plan_bucketed(layout)

    assert plan.padding_fraction < 0.25
    assert len(plan.key_place.unique()) == layout.segment_starts[-1]
    assert torch.equal(plan.key_pad[plan.key_place], torch.arange(int(layout.segment_starts[-1])))
    assert max(b.num_keys for b in plan.full) == max(np.diff(layout.segment_starts))


def test_fp32_stays_close_and_finite():
    """The fp32 path is finite everywhere and within 1e-5 of fp64."""
    layout, q, k, v = make(CASES["odd lengths"], torch.float32)
    plan = plan_bucketed(layout)

    got = plan.attend(torch.cat([q, k], dim=1), v)
    exact = plan.attend(torch.cat([q, k], dim=1).double(), v.double())

    assert bool(torch.isfinite(got).all())
    assert torch.allclose(got.double(), exact, atol=1e-5)
