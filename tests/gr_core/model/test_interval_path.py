"""The interval path, its kernels interpreted, against the dense reference in fp64: layouts, weights, whole models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gr_core.model.attention import Layout, Pointwise, plan_dense
from gr_core.model.attention.interval import plan_interval
from gr_core.model.attention.plan import NUM_DISTANCES

HOUR_US = 3_600_000_000
SEGMENTS = ((1, 0), (0, 1), (61, 4), (0, 3), (70, 2))


def targets_behind_history(**changes: Any) -> Layout:
    """Lay segments out as `pack.tokens = targets`: history, then targets that see all history asked before them."""
    starts, lo, hi, targets, position = [0], [], [], [], []
    for history, asked in SEGMENTS:
        first = starts[-1]
        lo += [first] * (history + asked)
        hi += [first + min(j, history) for j in range(history + asked)]
        position += [min(j, history) for j in range(history + asked)]
        targets += range(first + history, first + history + asked)
        starts.append(first + history + asked)
    return _layout(starts, lo, hi, targets, position, **changes)


def interleaved(**changes: Any) -> Layout:
    """Lay segments out as `pack.tokens = interleaved`: tokens in time, of which some are targets; groups share a time."""
    starts, lo, hi, targets, position = [0], [], [], [], []
    for history, asked in SEGMENTS:
        first, count = starts[-1], history + asked
        lo += [first + max(j - 30, 0) for j in range(count)]
        hi += [first + max(j // 3 * 3, j - 30, 0) for j in range(count)]
        position += [j // 3 * 3 for j in range(count)]
        targets += range(first, first + count, 2)
        starts.append(first + count)
    return _layout(starts, lo, hi, targets, position, **changes)


def _layout(
    starts: list[int],
    lo: list[int],
    hi: list[int],
    targets: list[int],
    position: list[int],
    *,
    window: int | None = None,
    **changes: Any,
) -> Layout:
    rng = np.random.default_rng(0)
    times = [np.sort(rng.integers(0, 900 * HOUR_US, n)) for n in np.diff(starts)]
    first, end = np.array(lo), np.array(hi)
    return Layout(
        segment_starts=np.array(starts),
        lo=first if window is None else np.maximum(first, end - window),
        hi=end,
        targets=np.array(targets),
        time=np.concatenate(times),
        position=np.array(position),
        **changes,
    )


LAYOUTS = {
    "targets": targets_behind_history(),
    "targets, window": targets_behind_history(window=20),
    "targets, decay": targets_behind_history(window=40, half_life_us=50.0 * HOUR_US),
    "interleaved, window": interleaved(),
    "hstu": targets_behind_history(distances=True),
    "hstu, interleaved, window": interleaved(distances=True),
}


def attended(plan: Any, made: Layout, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Return what all tokens and what targets alone get, and the gradients of queries, keys, values and biases."""
    q, k, v, positions, times = leaves
    pointwise = Pointwise(positions, times, 25.0) if made.distances else None
    targets = torch.from_numpy(made.targets)
    out = torch.cat(
        [plan.attend(torch.cat([q, k], dim=1), v, pointwise), plan.attend_targets(q[targets], k, v, pointwise)]
    )
    wanted = leaves if made.distances else leaves[:3]
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent.to(out.dtype))]


@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_interval_path_equals_dense_with_gradients(made: Layout) -> None:
    """All tokens and targets alone, values and every gradient, in fp32 to 1e-5 of the reference in fp64."""
    generator = torch.Generator().manual_seed(0)
    count = len(made.lo)
    shapes = [(count, 2, 8)] * 3 + [(NUM_DISTANCES, 2)] * 2
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    single = [x.detach().float().requires_grad_() for x in exact]
    cotangent = torch.randn(count + len(made.targets), 2, 8, generator=generator, dtype=torch.float64)

    got = attended(plan_interval(made), made, single, cotangent)

    for mine, theirs in zip(got, attended(plan_dense(made), made, exact, cotangent), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=1e-5, rtol=1e-5)


def test_every_tensor_of_the_plan_goes_where_the_batch_goes() -> None:
    """`map` reaches all of them, so none stays behind on the CPU; padding is none."""
    plan = plan_interval(LAYOUTS["hstu"])
    moved = plan.map(lambda x: x.to("meta"))

    assert len(plan.tensors()) == 10
    assert all(x.is_meta for x in moved.tensors())
    assert plan.padding_fraction == 0.0


@pytest.mark.parametrize("changes", [{"block": "hstu"}, {"time_half_life_days": 0.25}], ids=["hstu", "softmax, decay"])
def test_a_model_on_the_interval_path_equals_dense(tokens: Any, users: Any, changes: dict[str, Any]) -> None:
    """Logits and the gradients of every parameter of a whole model, in fp32, agree to 1e-4."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, **changes))
    found = []
    for planner in (plan_interval, plan_dense):
        net.builder.planner = planner
        inputs = net.builder.build(tokens.make_batch(users))
        logits = net.model(net.tables.weight[inputs.rows], inputs)
        found.append((logits, *torch.autograd.grad(logits.square().sum(), list(net.model.parameters()))))

    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4, rtol=1e-4)
