"""The token budget of a night's packs: the config's, or what fits the memory that it names."""

from __future__ import annotations

import logging
from typing import Any

from gr_core.config import AUTO_BUDGET, Config
from gr_core.lake import store

logger = logging.getLogger(__name__)

_SCORED_TOKENS = 8192  # of packs that are scored only: without gradients a batch takes a fraction of a step's memory


def token_budget(config: Config, words: dict[str, Any], role: str) -> int:
    """Return the most tokens of a batch.

    Args:
        config: pack.token_budget, and what decides it where that is "auto": train.memory_gib, model, sequences.
        words: The vocabulary that the pack is encoded by (uri): its tables' rows take memory.
        role: Of the pack; only train packs are fitted.

    Raises:
        ConfigError: The memory holds no batch of one longest segment; names the smallest that does.
    """
    given = config.pack.token_budget
    if given != AUTO_BUDGET:
        return int(given)
    if role != "train":
        return max(_SCORED_TOKENS, config.segment_tokens)
    from gr_core.train.memory import GIB  # torch, which other stages of packing never load

    tables = store.read_json(store.join(words["uri"], "vocabulary.json"))["tables"]
    tokens, memory = _fit(config, {name: int(table["rows"]) for name, table in tables.items()})
    logger.info(
        "token budget %d fits train.memory_gib = %s: %.2f GiB fixed, %.0f KiB a token, %.2f GiB a step",
        tokens,
        config.train.memory_gib,
        memory.fixed / GIB,
        memory.per_token / 1024,
        memory.total(tokens) / GIB,
    )
    return tokens


def check_budget(config: Config) -> None:
    """Refuse a memory that holds no batch even with tables of the planned rows alone, before a night begins.

    Raises:
        ConfigError: As `token_budget` does.
    """
    if config.pack.token_budget == AUTO_BUDGET:
        _fit(config, dict.fromkeys(config.model.features, 0))


def _fit(config: Config, rows: dict[str, int]) -> tuple[int, Any]:
    """Return the most tokens of a batch, and the memory of a step, of tables with these rows or the planned, if more."""
    from gr_core.train.memory import Workload, fit_token_budget

    planned = config.train.planned_rows
    workload = Workload(
        model=config.model,
        train=config.train,
        num_actions=len(config.source.action_names),
        num_supervised=config.source.supervised_mask.bit_count(),
        rows={name: max(number, planned.get(name, 0)) for name, number in rows.items()},
        max_history=config.segment_tokens - config.sequences.max_targets * config.tokens_per_event,
        max_targets=config.sequences.max_targets * config.tokens_per_event,
    )
    return fit_token_budget(workload)
