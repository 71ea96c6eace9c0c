"""What must belong together before a night trains: run, pack and parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gr_core.errors import ConfigError, FormatError
from gr_core.model.settings import ModelConfig
from gr_core.train.run import Run, settings_of


def check_pack(run: Run, index: Mapping[str, Any]) -> None:
    """Refuse a pack that this run cannot train on.

    Raises:
        ConfigError: Another role, other features than the model's, or interleaved segments that attention.require cannot do.
        FormatError: Another vocabulary than the run's.
    """
    if index["role"] != "train":
        raise ConfigError(f"{run.pack} has role {index['role']}; only train packs are trained on", where=str(run.pack))
    causal = index.get("segment_causal", [])
    if run.attention.require == "fa3" and not all(causal):
        raise ConfigError(
            f"attention.require = 'fa3' needs segments that are plainly causal, {causal.count(False)} of {len(causal)} in "
            f"{run.pack} are not: an event became visible only after the next one was shown, or a limit cuts; set "
            "attention.require = 'none'",
            where="attention.require",
        )
    if set(index["features"]) != set(run.model.features) or {t.name for t in run.tables} != set(run.model.features):
        raise ConfigError(
            f"pack features {index['features']} and tables {[t.name for t in run.tables]} must be the model's "
            f"{list(run.model.features)}; pack again with this config",
            where="model.item_features",
        )
    if run.vocabulary_version and index["vocabulary"] != run.vocabulary_version:
        raise FormatError(
            f"{run.pack} was made with vocabulary {index['vocabulary']}, the run names {run.vocabulary_version}; pack again",
            where=str(run.pack),
        )


def check_parent(run: Run, state: Mapping[str, Any], actions: Sequence[str], supervised: Sequence[str]) -> None:
    """Refuse a parent that this run cannot start from.

    Args:
        run: The night's run, with a parent.
        state: The parent's state.json.
        actions: The pack's actions in bit order.
        supervised: Those of them that are trained.

    Raises:
        ConfigError: Another model, or other actions.
        FormatError: A checkpoint of a running training: its watermark speaks of batches that it has not consumed.
    """
    if settings_of(ModelConfig, state["config"]["model"], "model") != run.model:
        raise ConfigError(
            f"model must equal the parent's, got {run.model}, the parent {run.parent} has "
            f"{state['config']['model']}; a change of the model is a full retrain",
            where="model",
        )
    if state["actions"] != actions or state["supervised"] != supervised:
        raise ConfigError(
            f"actions must equal the parent's, got {actions} with {supervised} supervised, the parent has "
            f"{state['actions']} with {state['supervised']}; a change of actions is a full retrain",
            where="source.actions",
        )
    cursor = state["cursor"]
    if cursor["batch"] < cursor["batches"]:
        raise FormatError(
            f"{run.parent} is a checkpoint of a running training, {cursor['batch']} of {cursor['batches']} batches; only a "
            "night's final checkpoint can be a parent",
            where=str(run.parent),
        )
