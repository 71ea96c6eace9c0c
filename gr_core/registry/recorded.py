"""What a registered version and a night's run say of themselves: where the data, the settings and the source came from.

Tags of a model version, each below "daybreak.": all that tells one version from another without the journal at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gr_core.config_rules import config_difference
from gr_core.hashing import fingerprint
from gr_core.revision import git_revision

MAX_CHARACTERS = 5000  # of a tag's value in MLflow


def version_tags(
    *,
    night: Mapping[str, Any],
    table_uri: str,
    bound: Mapping[str, Any],
    trained: Mapping[str, Any],
    parent_config: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return the tags of a registered version.

    Args:
        night: The night as JSON (Night.to_json).
        table_uri: URI of the event table.
        bound: The night's bound, as JSON.
        trained: What training returned: digest, watermark, newest_supervised_us.
        parent_config: Resolved config that the parent was trained with; None: no parent.

    Returns:
        date, mode, parent, experiment and beside (an experiment's alone); data.table, data.delta_version, data.commit;
        bound, watermark (JSON); config.fingerprint, config.difference (JSON, dotted key -> [the parent's, this one's]);
        git.revision and git.dirty (not outside a checkout); seed, digest.
    """
    parent, config = night.get("parent") or {}, night["config"]
    changed = None if parent_config is None else config_difference(dict(parent_config), config)
    return {
        "date": str(night["date"]),
        "mode": str(night["mode"]),
        "parent": str(parent.get("version")),
        **{key: str(night[key]) for key in ("experiment", "beside") if night.get(key)},
        "data.table": table_uri,
        "data.delta_version": str(bound["delta_version"]),
        "data.commit": str(bound["commit"]),
        "bound": _json(bound),
        "watermark": _json(trained["watermark"]),
        "config.fingerprint": fingerprint(config),
        "config.difference": _short(changed),
        **{f"git.{key}": value for key, value in git_revision().items()},
        "seed": str(night["seed"]),
        "digest": str(trained["digest"]),
    }


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _short(changed: dict[str, list[Any]] | None) -> str:
    """Return a config difference as JSON that fits a tag: beyond that the keys alone, then their number."""
    if changed is None:
        return "no parent"
    forms = (changed, sorted(changed), {"changed_keys": len(changed)})
    return next(text for text in map(_json, forms) if len(text) <= MAX_CHARACTERS)


def run_name(key: str) -> str:
    """Return the name of a night's run in MLflow: its key, an experiment's as <date>-<name>."""
    return key.replace("+experiment-", "-")
