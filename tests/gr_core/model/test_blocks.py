"""RoPE depends on distances, and the top block is the full block at the targets."""

import torch

from gr_core.model.blocks import Block, rope_angles, rotate


def test_scores_depend_on_distance_only():
    """Shifting query and key positions by the same amount changes no score."""
    q, k = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    near, far = rope_angles(torch.arange(6), 8), rope_angles(torch.arange(6) + 90, 8)

    score = (rotate(q, near) * rotate(k.flip(0), near.flip(0))).sum(-1)
    shifted = (rotate(q, far) * rotate(k.flip(0), far.flip(0))).sum(-1)

    assert torch.allclose(score, shifted, atol=1e-4)
    assert not torch.allclose(score, (q * k.flip(0)).sum(-1), atol=1e-2)


def test_top_block_equals_the_full_block_at_the_targets(tokens, users):
    """Running queries and feed-forward for targets only gives the full block's rows, and its gradients of history."""
    net = tokens.Net()
    inputs = net.builder.build(tokens.make_batch(users))
    full, top = Block(tokens.MODEL, top=False), Block(tokens.MODEL, top=True)
    top.load_state_dict(full.state_dict())
    x = torch.randn(len(inputs.gaps), tokens.MODEL.width, requires_grad=True)
    angles = rope_angles(inputs.positions, net.model.head_dim)

    expected = full(x, inputs.plan, inputs.targets, angles)[inputs.targets]
    got = top(x, inputs.plan, inputs.targets, angles)

    assert torch.allclose(got, expected, atol=1e-5)
    cotangent = torch.randn_like(got)
    mine, theirs = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, expected))
    assert torch.allclose(mine, theirs, atol=1e-4)
