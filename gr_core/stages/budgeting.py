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
    from gr_core.train.memory import GIB, Workload, fit_token_budget  # torch, which other stages of packing never load

    planned = config.train.planned_rows
    tables = store.read_json(store.join(words["uri"], "vocabulary.json"))["tables"]
    tokens, memory = fit_token_budget(
        Workload(
            model=config.model,
            train=config.train,
            num_actions=len(config.source.action_names),
            num_supervised=config.source.supervised_mask.bit_count(),
            rows={name: max(int(table["rows"]), planned.get(name, 0)) for name, table in tables.items()},
            max_history=config.segment_tokens - config.sequences.max_targets * config.tokens_per_event,
            max_targets=config.sequences.max_targets * config.tokens_per_event,
        )
    )
    logger.info(
        "token budget %d fits train.memory_gib = %s: %.2f GiB fixed, %.0f KiB a token, %.2f GiB a step",
        tokens,
        config.train.memory_gib,
        memory.fixed / GIB,
        memory.per_token / 1024,
        memory.total(tokens) / GIB,
    )
    return tokens
