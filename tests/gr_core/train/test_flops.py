"""Floating-point operations of a batch, by hand and by torch's own counter."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gr_core.model.inputs import InputBuilder
from gr_core.train.flops import ModelFlops


def test_a_batch_of_two_tokens_by_hand():
    """Matrices count 3 x 2 FLOP a token and entry, attention 3.5 x 2 a pair; the top layer's queries are targets."""
    flops = ModelFlops(macs_a_token=10, macs_a_target=7, macs_a_pair=8, lower_layers=2)

    found = flops.of_batch(np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([2]))

    # pairs: token 0 itself; token 1 key 0 and itself; token 2 key 1 and itself
    assert found.matrices == 6 * (3 * 10 + 1 * 7)
    assert found.attention == 7 * 8 * (2 * (1 + 2 + 2) + 2)
    assert found.total == found.matrices + found.attention


@pytest.mark.parametrize("block", ["softmax", "hstu"])
def test_matrices_are_those_that_torch_counts(tokens, users, block):
    """The forward matrix products of a whole batch, as FlopCounterMode sees them: equal to the last one."""
    net = tokens.Net(config=dataclasses.replace(tokens.MODEL, block=block))
    flops = ModelFlops.of(net.model, width=net.config.width, num_layers=net.config.num_layers)
    batch = tokens.make_batch(users)
    inputs = InputBuilder(net.config, net.actions, net.supervised, net.builder.row_map).build(batch)

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.model(net.tables.weight[inputs.rows], inputs)

    products = counter.get_flop_counts()["Global"]
    matrices = sum(count for op, count in products.items() if "mm" in str(op) and "bmm" not in str(op))
    found = flops.of_batch(batch.lo.numpy(), batch.hi.numpy(), inputs.targets.numpy())
    assert found.matrices == 3 * matrices


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_below_the_top_serve_all_tokens(tokens, layers):
    """Every layer but the last adds its matrices a token; the last one keys and values alone."""
    config = tokens.MODEL.__class__(width=16, num_layers=layers, num_heads=2, item_features=("item_id",))
    model = tokens.Net(config=config, rows={"item_id": 40}).model
    flops = ModelFlops.of(model, width=16, num_layers=layers)
    block = 4 * 16 * 16 + 3 * 16 * 32

    assert flops.lower_layers == layers - 1
    assert flops.macs_a_token == 16 * (3 * len(tokens.ACTIONS) + 1) + (layers - 1) * block + 2 * 16 * 16
