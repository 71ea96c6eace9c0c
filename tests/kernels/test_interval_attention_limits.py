"""What the interval attention kernels take and how far: sizes, buckets of distances, and the list for the check."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gr_core.model.attention.plan import log_bucket as log_bucket_numpy
from kernels.choice import Impl
from kernels.interval_attention import Decay, Silu, interval_attention
from kernels.interval_attention.triton_op import _LARGEST_STRIDE, _check, launched
from kernels.interval_attention.weighting import log_bucket


def test_buckets_are_those_of_the_training_core() -> None:
    """Position and time buckets agree with `log_bucket`, in particular where a bucket begins, and a microsecond before."""
    edges = [2.0 ** (b / 2) - 1 for b in range(2, 60)]
    positions = np.unique([max(int(e) + d, 0) for e in edges[:40] for d in (-1, 0, 1)])
    seconds = np.unique([int(e) + d for e in edges for d in (0, 1)])
    times = np.concatenate([seconds * 10**6, seconds * 10**6 - 1, np.arange(0, 4 * 10**6, 999_983), [-5]])
    wanted = log_bucket_numpy(positions), log_bucket_numpy(times / 1e6)

    assert log_bucket(torch.from_numpy(positions)).tolist() == wanted[0].tolist()
    assert _buckets_of_the_kernels(positions, np.zeros_like(positions), 0) == wanted[0].tolist()
    assert _buckets_of_the_kernels(np.zeros_like(times), times, 1) == wanted[1].tolist()


def _buckets_of_the_kernels(positions: np.ndarray, times: np.ndarray, table: int) -> list[int]:
    """Return the buckets by way of the weights: q is 0, silu(bias) is monotone, and the value is 1."""
    count = len(positions)
    tables = [torch.zeros(64, 1), torch.zeros(64, 1)]
    tables[table] = torch.arange(64.0)[:, None]
    weighting = Silu(
        position_bias=tables[0],
        time_bias=tables[1],
        divisor=1.0,
        query_position=torch.from_numpy(positions),
        key_position=torch.zeros(1, dtype=torch.int32),
        query_time=torch.from_numpy(times) + 1_750_000_000_000_000,
        key_time=torch.tensor([1_750_000_000_000_000]),
    )
    zero = torch.zeros(count).long()
    out = interval_attention(
        torch.zeros(count, 1, 16),
        torch.zeros(1, 1, 16),
        torch.ones(1, 1, 16),
        zero,
        zero,
        zero,
        weighting=weighting,
        impl="triton",
    )
    known = torch.nn.functional.silu(torch.arange(64.0))
    return (out[:, 0, :1] - known).abs().argmin(dim=1).tolist()


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (torch.zeros(1, 1, 16, dtype=torch.float64), torch.zeros(1, 1, 16), "float32 or all in bfloat16"),
        (torch.zeros(1, 1, 200), torch.zeros(1, 1, 200), "head dims of 1 to 128"),
        (torch.zeros(1).expand(2**31, 1, 16), torch.zeros(1, 1, 16), "by 32 bits"),
        (torch.zeros(1).expand(1, _LARGEST_STRIDE, 16), torch.zeros(1).expand(1, _LARGEST_STRIDE, 16), "by 32 bits"),
    ],
    ids=["fp64", "wide head", "2^31 queries", "wide rows"],
)
def test_what_the_kernels_do_not_take_is_refused(q: Tensor, k: Tensor, message: str) -> None:
    """By name, before anything is launched."""
    with pytest.raises(ValueError, match=message):
        _check(q, k, k)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lo": torch.tensor([-1, 0])}, "lo must be from 0, got -1 to 0"),
        ({"hi": torch.tensor([0, 4])}, "hi must be from 0 to 3, got 0 to 4"),
        ({"itself": torch.tensor([0, 3])}, "itself must be from 0 to 2, got 0 to 3"),
        ({"lo": torch.zeros(2)}, "one int a query"),
        ({"hi": torch.zeros(3).long()}, "one int a query"),
        ({"q": torch.zeros(2, 16)}, r"\[N, H, K\]"),
        ({"q": torch.zeros(2, 1, 0), "k": torch.zeros(3, 1, 0)}, "K from 1"),
        ({"half_life_us": 0.0}, "half_life_us must be above 0"),
    ],
    ids=["lo", "hi", "itself", "float", "too many", "two-dimensional", "no head dim", "half-life 0"],
)
def test_what_would_be_silently_wrong_is_refused(impl: Impl, changed: dict[str, Any], message: str) -> None:
    """On the CPU intervals that leave the keys, and anywhere shapes and half-lives that make no sense."""
    zero = torch.zeros(2).long()
    given = {"q": torch.zeros(2, 1, 16), "k": torch.zeros(3, 1, 16), "lo": zero, "hi": zero, "itself": zero} | changed
    decay = Decay(query_time=zero, key_time=torch.zeros(3).long(), half_life_us=given.get("half_life_us", 1.0))
    tensors = (given["q"], given["k"], given["k"], given["lo"], given["hi"], given["itself"])
    with pytest.raises(ValueError, match=message):
        interval_attention(*tensors, weighting=decay, impl=impl)


def test_rows_behind_two_to_the_31_entries_are_found() -> None:
    """300 rows 2^23 entries apart, so that the last ones lie behind 2^31: values and gradients are those of a copy."""
    size = 2 * 300 * _LARGEST_STRIDE
    room = mmap.mmap(
        -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # pages come into being where they are written
    far = torch.frombuffer(room, dtype=torch.bfloat16).as_strided((300, 3, 16), (_LARGEST_STRIDE, 16, 1))
    far.copy_(torch.randn(300, 3, 16, generator=torch.Generator().manual_seed(5)))
    itself = torch.arange(300)
    intervals = (itself - 3).clamp(min=0), itself, itself
    found = []
    for whole in (far, far.contiguous()):
        q, k, v = (x.detach().requires_grad_() for x in whole.split(1, dim=1))
        out = interval_attention(q, k, v, *intervals, impl="triton")
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))])

    assert far.stride(0) * 299 > 2**31
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert float(found[0][0][260:].abs().max()) > 0.1


def test_every_kernel_that_may_be_launched_is_listed_for_the_check() -> None:
    """`launched` has all four kernels for both dtypes, and every half-precision product is to be wgmma."""
    found = list(launched())

    assert {v.kernel.__name__ for v in found} == {
        "bounds_kernel",
        "reach_kernel",
        "forward_kernel",
        "query_grad_kernel",
        "key_grad_kernel",
        "bias_grad_kernel",
    }
    assert all(v.half_dot == ("bf16" in v.label) for v in found)
    assert len({(v.kernel.__name__, v.label) for v in found}) == len(found)
