"""The model of a step's memory, the budget that fits a memory, and how large a model is."""

from dataclasses import replace
from pathlib import Path

import pytest

from gr_core.config import load_config
from gr_core.errors import ConfigError
from gr_core.model.settings import ModelConfig
from gr_core.train.memory import GIB, RUNTIME_BYTES, Workload, count_parameters, fit_token_budget, step_memory
from gr_core.train.settings import TrainConfig

CONF = Path(__file__).parents[3] / "conf"
WORK = Workload(
    model=ModelConfig(width=32, num_layers=3, num_heads=2, item_features=("item_id", "kind")),
    train=TrainConfig(),
    num_actions=3,
    num_supervised=2,
    rows={"item_id": 10_000, "kind": 10},
    max_history=96,
    max_targets=32,
)


def test_h100_has_a_billion_embedding_and_a_hundred_million_dense_parameters():
    """conf/h100.toml loads, and its model on the planned rows is as large as it says; nothing is allocated."""
    config = load_config(CONF / "h100.toml")
    rows = {name: config.train.planned_rows.get(name, 100) for name in config.model.features}

    counts = count_parameters(config.model, num_actions=3, num_supervised=3, rows=rows)

    assert 0.9e9 <= counts["embedding"] <= 1.1e9
    assert 90e6 <= counts["dense"] <= 110e6
    assert config.sequences.max_history == 1024
    assert (config.train.precision, config.train.distributed.ranks) == ("bf16", 8)


def test_memory_counts_tables_parameters_and_activations():
    """A row more costs its weight and state, fixed; checkpointing and bf16 make a token cheaper, together most."""
    plain = step_memory(WORK)
    rows = step_memory(replace(WORK, rows={"item_id": 20_000, "kind": 10}))
    block = step_memory(replace(WORK, train=TrainConfig(activation_checkpointing="block")))
    half = step_memory(replace(WORK, train=TrainConfig(precision="bf16")))
    both = step_memory(replace(WORK, train=TrainConfig(precision="bf16", activation_checkpointing="block")))

    assert rows.fixed - plain.fixed == 10_000 * (4 * 32 + 4 + 1)
    assert plain.fixed > RUNTIME_BYTES
    assert both.per_token < min(block.per_token, half.per_token)
    assert max(block.per_token, half.per_token) < plain.per_token
    assert plain.total(2048) == pytest.approx(plain.fixed + 2048 * plain.per_token, rel=1e-9)


def test_the_budget_is_the_largest_that_fits():
    """The step fits the memory, and the next larger budget does not; cheaper tokens make a larger budget."""
    work = replace(WORK, train=TrainConfig(memory_gib=1.0))
    tokens, memory = fit_token_budget(work)
    cheaper, _ = fit_token_budget(replace(work, train=replace(work.train, activation_checkpointing="block")))

    assert tokens % 64 == 0
    assert memory.total(tokens) <= 1.0 * GIB < memory.total(tokens + 64)
    assert cheaper > tokens


def test_too_little_memory_names_the_smallest_that_works():
    """The error names key, value and the least memory; with that one segment fits."""
    with pytest.raises(
        ConfigError, match=r"train\.memory_gib = 0\.5 holds no batch.*smallest that works is ([0-9.]+)"
    ) as e:
        fit_token_budget(replace(WORK, train=TrainConfig(memory_gib=0.5)))
    least = float(e.value.message.partition("smallest that works is ")[2].partition(",")[0])

    tokens, _ = fit_token_budget(replace(WORK, train=TrainConfig(memory_gib=least)))
    assert tokens >= WORK.segment_tokens
    with pytest.raises(ConfigError, match=r"needs train\.memory_gib"):
        fit_token_budget(WORK)


def test_an_eighth_of_tables_and_parameters_a_rank():
    """Sharded over eight ranks, tables and dense states take an eighth of a rank's memory, and a block whole."""
    one = step_memory(WORK)
    spread = {"strategy": "hsdp", "shard": 8}
    config = TrainConfig(micro_batches=8, distributed=type(WORK.train.distributed)(**spread))
    eighth = step_memory(replace(WORK, train=config))

    assert eighth.fixed - RUNTIME_BYTES < 0.4 * (one.fixed - RUNTIME_BYTES)
    assert eighth.per_token == one.per_token
