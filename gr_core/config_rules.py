"""What a config must share with its home and with the parent of a night; pure, from journal entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from gr_core.config import Config
from gr_core.errors import ConfigError
from gr_core.lake.entries import Entry
from gr_core.lake.ledger import champion
from gr_core.model.settings import ModelConfig

_MODEL_DEFAULTS = TypeAdapter(ModelConfig).dump_python(ModelConfig(), mode="json")


def check_lake(config: Config, entries: Sequence[Entry]) -> None:
    """Refuse a config whose `lake` differs from the home's, or whose list of actions was reordered.

    Raises:
        ConfigError: Names the key, what it is in the home, and what it is here.
    """
    first = next((entry for entry in entries if entry.kind == "opened"), None)
    if first is None:
        return
    was, now = first.payload["config"]["lake"], config.resolved()["lake"]
    changed = {key for key in ("zone", "num_buckets", "holdout_fraction") if was[key] != now[key]}
    if changed:
        key = sorted(changed)[0]
        raise ConfigError(
            f"lake.{key} never changes in a home: it is {was[key]!r}, got {now[key]!r}; set it back, or start "
            "another home with --home",
            where=f"lake.{key}",
        )
    lists = [[a["name"] for a in e.payload["config"]["source"]["actions"]] for e in entries if "config" in e.payload]
    names = max(lists, key=len)
    if config.source.action_names[: len(names)] != names:
        raise ConfigError(
            f"source.actions is append only: it is {names}, got {config.source.action_names}; "
            "set the order back and add new actions at the end",
            where="source.actions",
        )


def refuse_full_retrain(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a resolved config whose model, vocabulary or list of actions differs from the parent's.

    Raises:
        ConfigError: Names the key and both values.
    """
    model = {**_MODEL_DEFAULTS, **was["model"]}  # a parent older than a key had what is now its default
    for section, before in (("model", model), ("vocabulary", was["vocabulary"])):
        difference = config_difference(before, now[section])
        # when rows are evicted is a full retrain's own affair
        difference = {key: values for key, values in difference.items() if not key.endswith(".ttl_days")}
        if difference:
            key, (old, new) = next(iter(difference.items()))
            _refuse(f"{section}.{key}", old, new)
    actions = [[(a["name"], a["supervise"]) for a in config["source"]["actions"]] for config in (was, now)]
    if actions[0] != actions[1]:
        _refuse("source.actions", *([f"{name} (supervise = {on})".lower() for name, on in part] for part in actions))


def _refuse(key: str, old: Any, new: Any) -> None:
    raise ConfigError(
        f"{key} must equal the parent's: it is {old!r}, got {new!r}; changing it is a full retrain: run "
        "`daybreak full-retrain` with this config, or set the key back",
        where=key,
    )


def trained_with(entries: Sequence[Entry], version: int) -> dict[str, Any]:
    """Return the resolved config that a registered version was trained with."""
    found = (e.payload for e in reversed(entries) if e.kind == "registered" and e.payload["version"] == version)
    return dict(next(found)["config"])


def features_of(trained: dict[str, Any]) -> set[str]:
    """Return the features, item_id among them, of the model of a resolved config."""
    model = {**_MODEL_DEFAULTS, **trained["model"]}
    return {*model["item_features"], *model["context_features"]}


def check_rivals(config: Config, entries: Sequence[Entry]) -> None:
    """Refuse a full retrain whose source does not give what the champion reads: the gate scores both on the same events.

    Raises:
        ConfigError: Names the features and the champion.
    """
    standing = champion(entries)
    if standing is None:
        return
    lost = sorted(features_of(trained_with(entries, standing.version)) - {"item_id", *config.source.side_features})
    if lost:
        raise ConfigError(
            f"source.feeds: the champion, version {standing.version}, reads {lost}, which this config no longer gives, and "
            "the gate scores champion and challenger on the same events; keep them as side features, the new model's "
            "model.item_features and model.context_features may leave them out",
            where="source.feeds",
        )


def config_difference(was: Any, now: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Return {dotted.key: [was, now]} of two resolved configs; lists are compared whole."""
    if isinstance(was, dict) and isinstance(now, dict):
        found: dict[str, list[Any]] = {}
        for key in sorted(was.keys() | now.keys()):
            found |= config_difference(was.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if was == now else {prefix: [was, now]}
