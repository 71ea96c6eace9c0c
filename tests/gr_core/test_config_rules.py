"""What a config must share with the parent of a night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gr_core.config import load_config
from gr_core.config_rules import refuse_full_retrain
from gr_core.errors import ConfigError

WORLD = Path(__file__).parents[2] / "conf" / "world.toml"


def resolved(*overrides: str) -> dict[str, Any]:
    """Return conf/world.toml, resolved."""
    return load_config(WORLD, list(overrides)).resolved()


def test_a_parent_older_than_a_key_of_the_model_had_its_default() -> None:
    """A model's section without today's new keys is the same model: its lineage goes on."""
    was = resolved()
    for key in ("block", "head", "time", "time_half_life_days", "hstu_divisor", "num_experts"):
        del was["model"][key]

    refuse_full_retrain(was, resolved())


@pytest.mark.parametrize(("key", "value"), [("block", "hstu"), ("head", "mmoe"), ("time", "rope")])
def test_another_block_or_head_than_the_parents_is_a_full_retrain(key: str, value: str) -> None:
    """The error names the key and both values, also where the parent is older than the key."""
    was = resolved()
    was["model"].pop(key)

    with pytest.raises(ConfigError, match=rf"model\.{key} must equal the parent's.*'{value}'"):
        refuse_full_retrain(was, resolved(f"model.{key}={value}"))
