"""Stages from sequences to packs: the night's vocabulary, the buckets' embedding rows, then one pack a role."""

from __future__ import annotations

import logging
from functools import lru_cache
from threading import Lock
from typing import Any

import pyarrow as pa

from gr_core.config import AUTO_BUDGET
from gr_core.config import VocabularyTable as VocabularyRule
from gr_core.data import packfile, ragged, sequences, vocabulary
from gr_core.data.interleaved import InterleavedSource, Places
from gr_core.errors import FormatError
from gr_core.hashing import file_sha256, fingerprint, short
from gr_core.lake import store
from gr_core.night import Night, run_stage, stage_fingerprint
from gr_core.refs import Bound, PackRef
from gr_core.stages.budgeting import token_budget
from gr_core.stages.sequencing import ROLES, Role, folder_digest, folder_intact

logger = logging.getLogger(__name__)

_LOADING = Lock()


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
        "rules": {name: rule.model_dump(exclude={"ttl_days"}) for name, rule in rules.items()},
    }
    folder = night.uri("vocabulary", f"vocabulary-{short(stage_fingerprint('vocabulary', identity))}")

    def work() -> dict[str, Any]:
        parent = None
        if night.parent is not None:
            parent = vocabulary.load(store.local_copy(night.parent.vocabulary))
        counts = {
            name: vocabulary.merge_counts([sequences.load_ids(store.local_copy(part["uri"]), name) for part in buckets])
            for name in config.model.features
        }
        grown = vocabulary.grow(parent, counts, rules)
        with store.directory(folder) as path:
            vocabulary.save(grown, path)
        return {"uri": folder, "version": grown.version, "rows": {n: t.rows for n, t in grown.tables.items()}}

    return run_stage(night, "vocabulary", identity, work, intact=vocabulary_intact)


def vocabulary_intact(words: dict[str, Any]) -> bool:
    """Tell whether a vocabulary is there and is the version that its result names."""
    try:
        return vocabulary.load(store.local_copy(words["uri"])).version == str(words["version"])
    except (FormatError, OSError, ValueError):
        return False


def pack_intact(pack: dict[str, Any]) -> bool:
    """Tell whether a pack is there and is the one that its PackRef describes."""
    try:
        folder = store.local_copy(pack["uri"])
        index = store.read_json(str(folder / packfile.INDEX_FILE))
        found = {name: file_sha256(folder / name) for name in index["sha256"]}
    except (FormatError, OSError, ValueError, KeyError):
        return False
    return bool(found == index["sha256"] and fingerprint(found) == pack["digest"])


def _part_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: part[key] for key in ("counts", "digest", "fingerprint")}


@lru_cache(maxsize=2)
def _loaded(uri: str, version: str) -> vocabulary.Vocabulary:
    """Load a vocabulary once for all buckets of a process; FormatError where it is another version's."""
    found = vocabulary.load(store.local_copy(uri))
    if found.version != version:
        raise FormatError(f"{uri} must hold vocabulary {version}, got {found.version}; restore the folder", where=uri)
    return found


def encode_bucket(
    night: Night, part: dict[str, Any], words: dict[str, Any], bucket: int, name: str = ""
) -> dict[str, Any]:
    """Look up the embedding row of every id in one bucket's dictionaries; tokens keep their codes.

    Args:
        night: The night.
        part: What `sequencing.build_bucket` returned for the bucket.
        words: A vocabulary (uri, version).
        bucket: The bucket's number.
        name: Tells encodings by other vocabularies than the night's own apart.

    Returns:
        uri, digest (of the files).
    """
    features = night.settings.model.features
    identity = {"bucket": _part_identity(part), "vocabulary": words["version"], "features": list(features)}
    folder = night.uri("encode", "encoded", *([name] if name else []), f"bucket-{bucket:05d}")

    def work() -> dict[str, Any]:
        with _LOADING:  # buckets start together
            tables = _loaded(words["uri"], words["version"]).tables
        ids = store.local_copy(part["uri"])
        with store.directory(folder) as path:
            for feature in features:
                rows = vocabulary.rows_of(sequences.load_ids(ids, feature), tables[feature])
                ragged.write_columns(path / f"{feature}.rows.arrow", {"row": pa.array(rows)})
            digest = folder_digest(path)
        return {"uri": folder, "digest": digest}

    mark = f"{name}-{bucket:05d}" if name else f"{bucket:05d}"
    return run_stage(night, "encode", identity, work, part=mark, intact=folder_intact)


def write_pack(
    night: Night,
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
    encoded: list[dict[str, Any]],
    words: dict[str, Any],
    role: Role,
    name: str | None = None,
) -> dict[str, Any]:
    """Write one role's pack: the buckets' segments, encoded and batched; read from their files a few batches at a time.

    Args:
        night: The night.
        ingested: What its ingestion returned.
        buckets: What `sequencing.build_bucket` returned, bucket by bucket.
        encoded: What `encode_bucket` returned for each of them.
        words: The vocabulary (version) that they are encoded by.
        role: The role.
        name: The pack's folder; None: the role.

    Returns:
        The PackRef as JSON.
    """
    config = night.settings
    fraction = config.train.negative_fraction if role == "train" else 1.0
    budget = token_budget(config, words, role)
    identity = {
        "buckets": [_part_identity(part) for part in buckets],
        "vocabulary": words["version"],
        "pack": config.pack.model_dump(),
        "seed": night.seed,
        "role": role,
        **({"negative_fraction": fraction} if fraction < 1.0 else {}),
        **({"token_budget": budget} if config.pack.token_budget == AUTO_BUDGET else {}),
    }
    folder = night.uri("pack", "packs", name or role)

    def work() -> dict[str, Any]:
        meta = packfile.PackMeta(
            role=role,
            features=config.model.features,
            actions=tuple(config.source.action_names),
            supervised=config.source.supervised_mask,
            tokens=config.pack.tokens,
            layout=config.pack.layout,
            grouping=config.pack.grouping,
            token_budget=budget,
            seed=night.seed,
            vocabulary=words["version"],
            bound=Bound.from_json(ingested["bound"]),
            fingerprint=fingerprint(identity),
            negative_fraction=fraction,
        )
        source = _source(buckets, encoded, role, interleaves=config.pack.tokens == "interleaved")
        with store.directory(folder) as path:
            index = packfile.write_pack(path, source, meta)
        return PackRef(
            uri=folder,
            role=role,
            num_tokens=index["num_tokens"],
            num_segments=index["num_segments"],
            num_supervised=index["num_supervised"],
            num_batches=len(index["batch_tokens"]),
            digest=fingerprint(index["sha256"]),
        ).to_json()

    return run_stage(night, "pack", identity, work, part=name or role, intact=pack_intact)


def _source(
    buckets: list[dict[str, Any]], encoded: list[dict[str, Any]], role: Role, *, interleaves: bool
) -> ragged.RaggedSource:
    """Map the buckets' files."""
    folders = [store.local_copy(part["uri"]) for part in buckets]
    parts = [ragged.read(folder) for folder in folders]
    tables = []
    for part, rows in zip(parts, encoded, strict=True):
        folder = store.local_copy(rows["uri"])
        files = {name: ragged.read_columns(folder / f"{name}.rows.arrow")[0] for name in part.features}
        tables.append({name: columns["row"].to_numpy() for name, columns in files.items()})
    bits = (1 << ROLES.index(role), 1 << len(ROLES) if role == "train" else 0)
    if interleaves:
        return InterleavedSource(parts, [Places.read(folder) for folder in folders], tables, *bits)
    return ragged.RaggedSource(parts, tables, *bits)


def encode_pack(
    night: Night,
    ingested: dict[str, Any],
    buckets: list[dict[str, Any]],
    words: dict[str, Any],
    role: Role,
    *,
    name: str,
) -> dict[str, Any]:
    """Write one role's pack with a vocabulary (uri, version) that is not the night's own.

    Returns:
        The PackRef as JSON.
    """
    encoded = [encode_bucket(night, part, words, bucket, name) for bucket, part in enumerate(buckets)]
    return write_pack(night, ingested, buckets, encoded, words, role, name)
