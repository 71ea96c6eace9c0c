"""The reference of interval attention against the definition, and its checks."""

import math

import pytest
import torch

from kernels.choice import Impl
from kernels.interval_attention import interval_attention, interval_attention_reference, interval_mask


def test_mask_is_the_interval_and_the_token_itself():
    """A query attends to keys [lo, hi) and to its own token, also where lo = hi."""
    mask = interval_mask(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 2]), torch.tensor([0, 3, 1]), 4)

    assert mask.int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("count", [1, 63, 200])
def test_reference_equals_a_loop_over_queries(count):
    """Every query's output is the softmax-weighted mean of its own keys' values, in fp64 to 1e-12."""
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(count, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    hi = torch.arange(count)
    lo = (hi - 7).clamp(min=0)

    out = interval_attention(q, k, v, lo, hi, torch.arange(count))

    for n in range(count):
        keys = [*range(int(lo[n]), int(hi[n])), n]
        weight = torch.softmax(torch.einsum("hk,jhk->jh", q[n], k[keys]) / math.sqrt(4), dim=0)
        assert torch.allclose(out[n], torch.einsum("jh,jhk->hk", weight, v[keys]), atol=1e-12)


@pytest.mark.parametrize("divisor", [None, 7.0], ids=["softmax", "silu"])
def test_a_bias_is_added_and_pointwise_weights_are_divided(divisor):
    """Weights are softmax(score + bias), or silu(score + bias) / divisor over the same keys, to 1e-12."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(20, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 20, 20, generator=generator, dtype=torch.float64)
    hi = torch.arange(20)
    lo = (hi - 5).clamp(min=0)

    out = interval_attention_reference(q, k, v, lo, hi, hi, bias=bias, divisor=divisor)

    for n in range(20):
        keys = [*range(int(lo[n]), int(hi[n])), n]
        score = torch.einsum("hk,jhk->jh", q[n], k[keys]) / math.sqrt(4) + bias[:, n, keys].T
        weight = score.softmax(dim=0) if divisor is None else score * score.sigmoid() / divisor
        assert torch.allclose(out[n], torch.einsum("jh,jhk->hk", weight, v[keys]), atol=1e-12)


def test_gradients_are_those_of_the_definition():
    """Analytic and numeric gradients agree in fp64."""
    q, k, v = (torch.randn(5, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    hi = torch.arange(5)

    assert torch.autograd.gradcheck(lambda *x: interval_attention(*x, torch.zeros(5).long(), hi, hi), (q, k, v))


def test_bf16_is_computed_in_fp32():
    """A bf16 input gives the fp32 result rounded once."""
    q, k, v = (torch.randn(40, 2, 8) for _ in range(3))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    hi = torch.arange(40)

    got = interval_attention(q, k, v, torch.zeros(40).long(), hi, hi)
    exact = interval_attention(q.float(), k.float(), v.float(), torch.zeros(40).long(), hi, hi)

    assert torch.equal(got, exact.bfloat16())


def test_shapes_that_do_not_fit_are_named():
    """The message has both shapes; an unknown implementation is refused."""
    q, hi = torch.zeros(3, 2, 4), torch.zeros(3).long()
    with pytest.raises(ValueError, match=r"q \(3, 2, 4\).*k \(3, 1, 4\)"):
        interval_attention(q, q[:, :1], q[:, :1], hi, hi, hi)
    with pytest.raises(ValueError, match=r"lo must be one int a query"):
        interval_attention(q, q, q, hi[:2], hi, hi)
    with pytest.raises(ValueError, match="impl"):
        interval_attention(q, q, q, hi, hi, hi, impl="cuda")


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # numpy's, of masked products
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_keys_that_nobody_sees_may_hold_anything(impl: Impl) -> None:
    """Uninitialised rows behind the last visible key reach neither an output nor a gradient."""
    q, k, v = (torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    k[3], v[3] = float("nan"), float("inf")
    inputs = [x.requires_grad_() for x in (q[:3].clone(), k, v)]
    lo, hi, itself = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.arange(3)

    found = interval_attention(*inputs, lo, hi, itself, impl=impl)
    gradients = torch.autograd.grad(found.sum(), inputs)

    assert bool(torch.isfinite(found).all())
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
