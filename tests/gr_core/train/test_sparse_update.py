"""Tables updated inside the backward pass: equal to once a step, never with a number that is none, refused where illegal."""

import dataclasses

import pytest
import torch

from gr_core.config import parse_config
from gr_core.errors import ConfigError, TrainingError
from gr_core.model.embeddings import Tables, TableSpec
from gr_core.train import loop
from gr_core.train.optim import BackwardSparseOptimizer, SparseOptimizer
from gr_core.train.settings import TrainConfig
from gr_core.train.state import load_checkpoint


def quiet(line):
    del line


def test_both_ways_give_one_checkpoint(packs, users):
    """Two nights with clipping, dropout and id drop: the digests are those of updating once a step."""
    pack = packs.pack("p", users, token_budget=70)
    model = dataclasses.replace(packs.run(pack, "x").model, dropout=0.1)
    digests = []
    for way in ("step", "backward"):
        settings = {"sparse_update": way, "clip_norm": 0.01}
        loop.train(packs.run(pack, f"{way}-1", settings=settings, model=model), quiet)
        second = packs.run(pack, f"{way}-2", settings=settings, model=model, parent=packs.root / f"{way}-1", seed=1)
        digests.append(loop.train(second, quiet)["digest"])

    assert digests[0] == digests[1]


def test_rows_move_inside_backward_and_other_rows_do_not(packs, users):
    """When backward returns, the batch's rows have moved; the step that follows changes no row."""
    night = loop.Night(packs.run(packs.pack("p", users), "c", settings={"sparse_update": "backward"}))
    before, seen = night.tables.weight.clone(), []
    collect = night.sparse.collect

    def look(rows, grad):
        seen.append((rows, night.tables.weight.clone()))
        collect(rows, grad)

    night.sparse.collect = look
    night.step([0], 1.0, loop.Attribution(night.device, 256))

    ((rows, after),) = seen
    moved = (before != after).any(dim=1).nonzero().squeeze(1).tolist()
    assert moved
    assert set(moved) <= set(rows.tolist())
    assert torch.equal(night.tables.weight, after)


@pytest.mark.parametrize("bad", ["loss", "dense", "sparse"])
def test_f4_nothing_moves_where_a_number_is_none(bad):
    """An infinite loss, dense or sparse gradient (case F4): values and state are what they were, and the check says so."""
    tables = Tables([TableSpec(name="a", rows=5, capacity=5)], 3, initial_accumulator=0.1)
    dense = torch.nn.Linear(3, 1)
    optimizer = BackwardSparseOptimizer(tables, dense, TrainConfig())
    before, state = tables.weight.clone(), tables.accumulator.clone()
    rows = torch.tensor([2, 4])
    values = tables.weight[rows].requires_grad_()
    factor = torch.tensor(torch.inf if bad == "loss" else 1.0)
    loss = dense(values).sum() * factor
    if bad == "dense":
        dense.weight.register_hook(lambda grad: grad * torch.inf)
    if bad == "sparse":
        values.register_hook(lambda grad: grad * torch.inf)

    optimizer.watch(rows, values, loss, 1.0)
    loss.backward()
    optimizer.collect(rows, values.grad)

    assert not bool(optimizer.finite())
    assert torch.equal(tables.weight, before)
    assert torch.equal(tables.accumulator, state)


def test_a_night_with_a_bad_gradient_stops_by_name(packs, users, monkeypatch):
    """The step-wise check reads what the backward pass found; the tables stay as they were after the step before."""
    night = loop.Night(packs.run(packs.pack("p", users, token_budget=120), "c", settings={"sparse_update": "backward"}))
    clock = loop.Attribution(night.device, 120)
    night.step([0], 1.0, clock)
    rows = night.tables.weight.clone()
    monkeypatch.setattr(loop, "batch_loss", lambda *args: args[0].sum() * torch.inf)

    with pytest.raises(TrainingError, match=r"not finite at step 1, batch"):
        night.step([1], 1.0, clock)

    assert torch.equal(night.tables.weight, rows)


WORLD = {
    "name": "w",
    "source": {
        "root": "data",
        "actions": [{"name": "click"}],
        "feeds": [
            {
                "name": "log",
                "path": "{date}.parquet",
                "event_id": "id",
                "shown_at": {"column": "t", "unit": "ms", "zone": "UTC"},
                "columns": {"user_id": "u", "item_id": "i"},
                "actions": {"click": "c"},
            }
        ],
    },
}


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ({"sparse_optimizer": "adamw"}, r"train\.sparse_optimizer must be one of rowwise_adagrad, got 'adamw'"),
        ({"sparse_update": "backward", "micro_batches": 2}, r"needs train\.micro_batches = 1 .* got micro_batches = 2"),
        ({"accumulator_decay": 0.0}, r"train\.accumulator_decay must be in \(0, 1\]"),
        ({"save_every_steps": -1}, r"train\.save_every_steps must be at least 0"),
        ({"keep_checkpoints": 0}, r"train\.keep_checkpoints must be at least 1"),
    ],
)
def test_f23_what_an_optimizer_cannot_do_is_refused_with_the_config(train, match):
    """By key, with what is allowed, when the config is read (case F23)."""
    assert parse_config(WORLD).train.sparse_optimizer == "rowwise_adagrad"
    with pytest.raises(ConfigError, match=match):
        parse_config({**WORLD, "train": train})


def test_f5_dense_moments_and_step_count_survive_growth(packs, users):
    """Table 40 to 45 rows (case F5): the child's first step goes on from the parent's moments, count and accumulators."""
    pack = packs.pack("p", users)
    loop.train(packs.run(pack, "a"), quiet)
    old, _ = load_checkpoint(packs.root / "a")
    run = packs.run(pack, "b", parent=packs.root / "a")
    tables = tuple(dataclasses.replace(t, rows=t.rows + 5) if t.name == "item_id" else t for t in run.tables)
    night = loop.Night(dataclasses.replace(run, tables=tables))
    own = night.dense.state()
    assert all(torch.equal(own[name], old[name]) for name in own)
    before = night.tables.accumulator.clone()

    night.step([0], 1.0, loop.Attribution(night.device, 256))

    count = "optimizer.dense.norm.weight.step"
    assert float(night.dense.state()[count]) == float(old[count]) + 1
    assert bool((night.tables.accumulator >= before).all())
    assert bool((night.tables.accumulator > before).any())


def test_the_accumulator_decays_once_at_the_warm_start(packs, users):
    """With accumulator_decay 0.25 a child starts from a quarter of its parent's state, new rows from their fallback's."""
    pack = packs.pack("p", users)
    loop.train(packs.run(pack, "a"), quiet)
    old, _ = load_checkpoint(packs.root / "a")
    run = packs.run(pack, "b", parent=packs.root / "a", settings={"accumulator_decay": 0.25})
    tables = tuple(dataclasses.replace(t, rows=t.rows + 5) if t.name == "item_id" else t for t in run.tables)

    state = loop.Night(dataclasses.replace(run, tables=tables)).tables.state()["optimizer.sparse.item_id.accumulator"]

    parent = old["optimizer.sparse.item_id.accumulator"]
    assert torch.equal(state[:40], parent * 0.25)
    assert torch.equal(state[40:], (parent[2] * 0.25).expand(5))


def test_the_accumulator_does_not_decay_when_a_night_is_resumed(packs, users):
    """Stopped and taken up, a night with decay ends as one that was not stopped: decay belongs to the warm start."""
    pack = packs.pack("p", users, token_budget=70)
    loop.train(packs.run(pack, "a"), quiet)
    settings = {"accumulator_decay": 0.5, "save_every_steps": 1}
    whole = loop.train(packs.run(pack, "whole", parent=packs.root / "a", settings=settings), quiet)
    run = packs.run(pack, "c", parent=packs.root / "a", settings=settings)
    apply, calls = SparseOptimizer.step, []

    def stop(optimizer, factor):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        apply(optimizer, factor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseOptimizer, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            loop.train(run, quiet)

    assert loop.train(run, quiet)["digest"] == whole["digest"]
