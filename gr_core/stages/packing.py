"""Stages from sequences to packs: the night's vocabulary, then one pack a role."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import polars as pl

from gr_core.config import VocabularyTable as VocabularyRule
from gr_core.data import packfile, packing, sequences, vocabulary
from gr_core.errors import FormatError
from gr_core.hashing import file_sha256, fingerprint, short
from gr_core.lake import store
from gr_core.night import Night, run_stage, stage_fingerprint
from gr_core.refs import Bound, PackRef
from gr_core.stages.sequencing import Role

logger = logging.getLogger(__name__)


def grow_vocabulary(night: Night, buckets: list[dict[str, Any]]) -> dict[str, Any]:
    """Grow the parent's vocabulary by what the buckets counted.

    Returns:
        uri, version, and {table: rows}.
    """
    config = night.settings
    rules = {name: config.vocabulary.get(name, VocabularyRule()) for name in config.model.features}
    identity = {
        "parent": night.parent.vocabulary if night.parent else None,
        "buckets": [_part_identity(part) for part in buckets],
        "rules": {name: rule.model_dump() for name, rule in rules.items()},
    }
    folder = night.uri("vocabulary", f"vocabulary-{short(stage_fingerprint('vocabulary', identity))}")

    def work() -> dict[str, Any]:
        parent = None
        if night.parent is not None:
            parent = vocabulary.load(store.local_path(night.parent.vocabulary))
        counts = {
            name: vocabulary.merge_counts(
                [pl.read_ipc(store.local_path(part["uri"]) / f"{name}.counts.arrow") for part in buckets]
            )
            for name in config.model.features
        }
        grown = vocabulary.grow(parent, counts, rules)
        with store.directory(folder) as path:
            vocabulary.save(grown, path)
        return {"uri": folder, "version": grown.version, "rows": {n: t.rows for n, t in grown.tables.items()}}

    return run_stage(night, "vocabulary", identity, work, intact=_vocabulary_intact)


def _vocabulary_intact(words: dict[str, Any]) -> bool:
    try:
        return vocabulary.load(store.local_path(words["uri"])).version == str(words["version"])
    except (FormatError, OSError, ValueError):
        return False


def _pack_intact(pack: dict[str, Any]) -> bool:
    folder = store.local_path(pack["uri"])
    try:
        index = store.read_json(store.join(pack["uri"], packfile.INDEX_FILE))
        found = {name: file_sha256(folder / name) for name in index["sha256"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(found == index["sha256"] and fingerprint(found) == pack["digest"])


def _part_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: part[key] for key in ("counts", "digest", "fingerprint")}


def write_pack(
    night: Night, ingested: dict[str, Any], buckets: list[dict[str, Any]], words: dict[str, Any], role: Role
) -> dict[str, Any]:
    """Write one role's pack: the buckets' segments, encoded by the night's own vocabulary and batched.

    Returns:
        The PackRef as JSON.
    """
    return encode_pack(night, ingested, buckets, words, role, name=role)


def encode_pack(
    night: Night,
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
    words: dict[str, Any],
    role: Role,
    *,
    name: str,
) -> dict[str, Any]:
    """Write one role's pack with a vocabulary (uri, version), which need not be the night's own.

    Returns:
        The PackRef as JSON.
    """
    config = night.settings
    bound = Bound.from_json(ingested["bound"])
    identity = {
        "buckets": [_part_identity(part) for part in buckets],
        "vocabulary": words["version"],
        "pack": config.pack.model_dump(),
        "seed": night.seed,
        "role": role,
    }
    folder = night.uri("pack", "packs", name)

    def work() -> dict[str, Any]:
        table = vocabulary.load(store.local_path(words["uri"]))
        parts = [_read_sequences(store.local_path(part["uri"]), role) for part in buckets]
        features, items = config.model.features, config.model.item_features
        segments = packfile.concat_segments([packing.to_segments(part, table, features, items) for part in parts])
        meta = packfile.PackMeta(
            role=role,
            features=features,
            actions=tuple(config.source.action_names),
            supervised=config.source.supervised_mask,
            tokens=config.pack.tokens,
            layout=config.pack.layout,
            grouping=config.pack.grouping,
            token_budget=config.pack.token_budget,
            seed=night.seed,
            vocabulary=words["version"],
            bound=bound,
            fingerprint=fingerprint(identity),
        )
        with store.directory(folder) as path:
            index = packfile.write_pack(path, segments, meta)
        return PackRef(
            uri=folder,
            role=role,
            num_tokens=index["num_tokens"],
            num_segments=index["num_segments"],
            num_supervised=index["num_supervised"],
            num_batches=len(index["batch_tokens"]),
            digest=fingerprint(index["sha256"]),
        ).to_json()

    return run_stage(night, "pack", identity, work, part=name, intact=_pack_intact)


def _read_sequences(folder: Path, role: str) -> sequences.Sequences:
    return sequences.Sequences(
        tokens=pl.read_ipc(folder / f"{role}.tokens.arrow"),
        segments=pl.read_ipc(folder / f"{role}.segments.arrow"),
    )
