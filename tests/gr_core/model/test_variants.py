"""Every block, head and way to tell time: equal on all CPU paths, isolated by segment, and able to learn."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from gr_core.model.attention import plan_bucketed, plan_dense
from gr_core.model.blocks import rope_angles, rotate, time_angles
from gr_core.model.hstu import HstuBlock
from gr_core.model.losses import batch_loss, token_losses
from gr_core.model.settings import ModelConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, rope time": {"time": "rope"},
    "softmax, decay": {"time_half_life_days": 0.25},
    "hstu": {"block": "hstu", "hstu_divisor": 16.0},
    "hstu, mmoe": {"block": "hstu", "head": "mmoe"},
    "softmax, mmoe": {"head": "mmoe", "num_experts": 3},
}
PLANNERS = {"bucketed": plan_bucketed, "dense": plan_dense}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


@each_variant
def test_the_bucketed_path_equals_dense_in_fp64_with_gradients(tokens, users, changes):
    """Logits and the gradients of every parameter agree to 1e-6."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, **changes))
    model = net.model.double()
    found = {}
    for name, planner in PLANNERS.items():
        net.builder.planner = planner
        inputs = net.builder.build(tokens.make_batch(users)).map(
            lambda x: x.double() if x.dtype == torch.float32 else x
        )
        logits = model(net.tables.weight[inputs.rows].double(), inputs)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        found[name] = (logits, *gradients)

    for mine, theirs in zip(found["bucketed"], found["dense"], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=1e-5)


@each_variant
def test_f1_other_users_values_change_nothing(tokens, users, changes):
    """Another user with other rows, actions and times but equal length moves no logit, exactly (case F1)."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, **changes))
    targets = int(users[6].supervise.sum())
    other = tokens.random_user("other", len(users[6].time) - targets, targets, seed=99)
    other = dataclasses.replace(other, time=other.time + 400 * 86_400 * tokens.US)
    mine = np.repeat(np.arange(len(users)) == 6, [int(user.supervise.sum()) for user in users])

    before = net.logits(users)
    after = net.logits([other if i == 6 else user for i, user in enumerate(users)])

    assert torch.equal(before[~mine], after[~mine])
    assert not torch.allclose(before[mine], after[mine], atol=1e-4)


@each_variant
def test_f17_the_place_in_a_pack_changes_nothing(tokens, users, changes):
    """The same user alone and behind others of other times has equal logits: no position or time runs on (case F17)."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, **changes))
    user = users[6]
    earlier = [dataclasses.replace(u, time=u.time - 300 * 86_400 * tokens.US) for u in (users[3], users[8])]

    alone = net.logits([user])
    third = net.logits([*earlier, user])[-len(alone) :]

    assert torch.allclose(alone, third, atol=1e-5)


@each_variant
def test_when_history_happened_matters(tokens, changes):
    """The same history at other times gives other logits in every variant."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, **changes))
    user = tokens.random_user("a", 20, 1, seed=4)
    shorter = dataclasses.replace(user, time=np.append(user.time[:-1] // 7 + user.time[-1] * 6 // 7, user.time[-1]))

    assert not torch.allclose(net.logits([user]), net.logits([shorter]), atol=1e-4)


def test_the_order_of_history_matters_to_hstu(tokens):
    """HSTU has no RoPE: at equal times its position bias tells order (the counts of the newest few are left out)."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, block="hstu", history_counts=False))
    for block in net.model.blocks:
        torch.nn.init.normal_(block.position_bias)
    user = tokens.random_user("a", 20, 1, seed=4)
    user = dataclasses.replace(user, time=np.append(np.zeros(20, np.int64), 100) * tokens.US)
    order = np.append(np.random.default_rng(0).permutation(20), 20)
    moved = {name: getattr(user, name)[order] for name in ("actions", "known")}
    shuffled = dataclasses.replace(user, rows={k: v[order] for k, v in user.rows.items()}, **moved)

    assert not torch.allclose(net.logits([user]), net.logits([shuffled]), atol=1e-5)


def test_hstu_s_top_block_equals_the_full_block_at_the_targets(tokens, users):
    """Running gate and queries for targets only gives the full block's rows, and its gradients of history."""
    config = dataclasses.replace(tokens.MODEL, block="hstu")
    net = tokens.Net(config)
    inputs = net.builder.build(tokens.make_batch(users))
    full, top = HstuBlock(config, top=False), HstuBlock(config, top=True)
    top.load_state_dict(full.state_dict())
    x = torch.randn(len(inputs.gaps), config.width, requires_grad=True)
    angles = rope_angles(inputs.positions, net.model.head_dim)

    expected = full(x, inputs.plan, inputs.targets, angles)[inputs.targets]
    got = top(x, inputs.plan, inputs.targets, angles)

    assert torch.allclose(got, expected, atol=1e-5)
    cotangent = torch.randn_like(got)
    mine, theirs = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, expected))
    assert torch.allclose(mine, theirs, atol=1e-4)


def test_timestamp_rope_depends_on_time_differences_and_tells_a_minute_from_an_hour():
    """Shifting all times by 300 days changes no score; a minute more between query and key does."""
    q, k = torch.randn(1, 2, 8), torch.randn(1, 2, 8)

    def score(query_us: int, key_us: int) -> torch.Tensor:
        both = [torch.tensor([us]) for us in (query_us, key_us)]
        return (rotate(q, time_angles(both[0], 16)) * rotate(k, time_angles(both[1], 16))).sum(-1)

    later, minute = 300 * 86_400_000_000, 60_000_000

    assert torch.allclose(score(50 * minute, 0), score(50 * minute + later, later), atol=1e-4)
    assert not torch.allclose(score(50 * minute, 0), score(50 * minute + minute // 2, 0), atol=1e-2)


BLOCKS = ({"block": "softmax"}, {"block": "hstu"})
LEARNERS = [(block, path) for block, path in itertools.product(BLOCKS, PLANNERS)] + [
    ({**changes, "head": "mmoe"}, "bucketed") for changes in (*BLOCKS, {"time": "rope"}, {"time_half_life_days": 1.0})
]
LEARNERS.append(({"num_layers": 1}, "bucketed"))  # the only block is the top one


@pytest.mark.parametrize(
    ("changes", "path"), LEARNERS, ids=[f"{'-'.join(map(str, changes.values()))}-{path}" for changes, path in LEARNERS]
)
def test_f13_every_block_head_and_path_overfits_a_hundred_users(tokens, changes, path):
    """100 users, 50 steps: the loss falls at least fivefold, and every block has a gradient (case F13)."""
    net = tokens.Net(dataclasses.replace(tokens.MODEL, width=32, num_heads=4, **changes))
    net.builder.planner = PLANNERS[path]
    inputs = net.builder.build(tokens.make_batch([tokens.random_user(f"u{i}", 4, 1, seed=i) for i in range(100)]))
    values = net.tables.weight[inputs.rows].requires_grad_()
    optimizer = torch.optim.Adam([*net.model.parameters(), values], lr=0.02)
    seen = []
    for _ in range(50):
        optimizer.zero_grad()
        losses = token_losses(net.model(values, inputs), inputs.labels, inputs.known, torch.ones(2))
        loss = batch_loss(losses, inputs.weights, float(inputs.weights.sum()))
        loss.backward()
        if not seen:
            norms = [sum(float(p.grad.norm()) for p in block.parameters()) for block in net.model.blocks]
            assert min(norms) > 0
        optimizer.step()
        seen.append(float(loss.detach()))

    assert seen[0] / seen[-1] > 5


REFUSED = {
    "another block": ({"block": "gru"}, "model.block must be one of softmax, hstu"),
    "another head": ({"head": "tower"}, "model.head must be one of"),
    "hstu with rope": ({"block": "hstu", "time": "rope"}, "model.block = 'hstu' has a time bias of its own"),
    "hstu with decay": ({"block": "hstu", "time_half_life_days": 3.0}, "model.time_half_life_days = 3.0"),
    "no divisor": ({"hstu_divisor": 0.0}, "model.hstu_divisor"),
    "no experts": ({"num_experts": 0}, "model.num_experts"),
    "half a minute": ({"time_half_life_days": 1e-4}, "model.time_half_life_days must be finite and at least 1 hour"),
    "one pair": ({"time": "rope", "width": 8, "num_heads": 4}, "model.time = 'rope' needs two pairs a head"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_together_is_refused_by_name(changes, message):
    """The error names the key and the value."""
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)
